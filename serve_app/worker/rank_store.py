"""How the ranks of a worker read chunks: each its own part, at the same time, and none gets another's bytes.

The other ranks' actors have ``hold(tickets, values, timeout_s)``, which reads and keeps, and ``export_chunk(id)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app.engine.kv_cache import KVCache
from serve_app.engine.loop import EngineLoop, EngineStopped
from serve_app.engine.parted import fits, held_whole, needs, part_of
from serve_app.kv.chunk import BadChunk
from serve_app.kv.parts import Parted, Payload
from serve_app.kv.reading import ElsewhereFailed, ObjectReader, Read, Reader, Value, is_lost, needed, within
from serve_app.parallel.cache import GroupCache
from serve_app.parallel.shelf import Shelf
from serve_app.wire.parts import Part

# So long what is of no use any more waits for more of it.
TOGETHER_S = 0.05
# What a rank needs to answer, beside reading.
ANSWER_S = 0.5
LATE, LOST = "late", "lost"


@dataclass(slots=True, frozen=True)
class Shared:
    """Chunks of ``layout`` have these ``parts``: rank 0's, and those of ``others``, who export them."""

    layout: str
    parts: tuple[Part, ...]
    others: Sequence[Any]


class RankReader:
    """Rank 0's. ``others``: the ranks beside it that keep anything, as their actors, each with what it needs; ``own``:
    what rank 0 reads with; ``drop(tickets)``: tells ranks what nobody needs any more, from any thread.
    """

    def __init__(
        self,
        others: Sequence[tuple[Any, Callable[[Part], bool]]],
        own: ObjectReader,
        drop: Callable[[list[int]], object],
    ) -> None:
        self._others, self._own, self._drop = others, own, drop
        self._tickets = itertools.count(1)
        self._gone: list[int] = []

    async def read(self, values: Sequence[Value], deadline: float) -> list[Read | BaseException]:
        tickets = [next(self._tickets) for _ in values]
        timeout_s = max(0.05, deadline - time.monotonic())
        loop = asyncio.get_running_loop()
        given: set[int] = set()
        try:
            asked = [
                within(actor.hold.remote(tickets, _wanted(values, needs), timeout_s), timeout_s + ANSWER_S)
                for actor, needs in self._others
            ]
            own, *others = await asyncio.gather(self._own.read(values, deadline), *asked, return_exceptions=True)
            if isinstance(own, BaseException):
                raise own
            found: list[Read | BaseException] = []
            for at, ticket in enumerate(tickets):
                trouble = next((error for one in others if (error := _trouble(one, at)) is not None), None)
                payload = _payload(own[at], ticket, trouble)
                if isinstance(payload, Payload):
                    given.add(ticket)
                    weakref.finalize(payload, self._finished, loop, ticket).atexit = False
                found.append(payload)
            return found
        finally:
            for ticket in set(tickets) - given:
                self._finished(loop, ticket)

    def _finished(self, loop: asyncio.AbstractEventLoop, ticket: int) -> None:
        """In any thread, and in the middle of anything: the collector calls it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the worker
            loop.call_soon_threadsafe(self._collect, loop, ticket)

    def _collect(self, loop: asyncio.AbstractEventLoop, ticket: int) -> None:
        if not self._gone:
            loop.call_later(TOGETHER_S, self._tell)
        self._gone.append(ticket)

    def _tell(self) -> None:
        gone, self._gone = self._gone, []
        self._drop(gone)


def reader_of(kv: KVCache, engine_loop: EngineLoop) -> Reader:
    """What reads chunks for a cache."""
    if not isinstance(kv, GroupCache):
        return ObjectReader(fits=partial(fits, part_of(held_whole(kv.shape))))
    whole = kv.whole

    def drop(tickets: list[int]) -> None:
        with contextlib.suppress(EngineStopped):
            engine_loop.call(lambda engine: kv.drop(tickets))

    runs = [part.runs() for part in whole.parts]
    others = [(actor, partial(needs, of_it)) for actor, of_it in zip(whole.handles, runs[1:], strict=True) if of_it]
    return RankReader(others, ObjectReader(partial(needs, kv.runs), partial(fits, kv.one_piece)), drop)


def shared_by(kv: KVCache) -> Shared | None:
    """How what a cache exports is divided; None: it exports all."""
    if not isinstance(kv, GroupCache) or not kv.whole.layers:
        return None
    others = [kv.whole.handles[rank - 1] for rank in kv.parts if rank]
    return Shared(kv.shape.layout.name, tuple(kv.parts.values()), others)


async def hold(shelf: Shelf, tickets: Sequence[int], values: Sequence[Value], timeout_s: float) -> list[str]:
    """Another rank's side: reads its parts of ``values`` and keeps them under ``tickets``. For each what went wrong,
    or "".
    """
    shelf.expect(tickets)
    said, kept = [], set()
    try:
        found = await ObjectReader().read(values, time.monotonic() + timeout_s)
        for ticket, read in zip(tickets, found, strict=True):
            if isinstance(read, BaseException):
                said.append(LATE if isinstance(read, TimeoutError) else LOST if is_lost(read) else repr(read))
                continue
            shelf.hold(ticket, read if isinstance(read, Payload) else Payload((), (read,)))
            kept.add(ticket)
            said.append("")
        return said
    finally:
        # Rank 0 will say the same, of all that one of the ranks has not read.
        shelf.release([ticket for ticket in tickets if ticket not in kept])


def _wanted(values: Sequence[Value], needs: Callable[[Part], bool]) -> list[Value]:
    return [needed(value, needs) if isinstance(value, Parted) else value for value in values]


def _trouble(answers: Any, at: int) -> BaseException | None:
    """What a rank could not do: it as a whole, or with one of the chunks."""
    if isinstance(answers, TimeoutError):
        return answers
    if isinstance(answers, BaseException):
        return ElsewhereFailed(repr(answers))
    if not answers[at]:
        return None
    if answers[at] == LATE:
        return TimeoutError()
    return BadChunk("an object of it is lost") if answers[at] == LOST else ElsewhereFailed(answers[at])


def _payload(own: Read | BaseException, ticket: int, trouble: BaseException | None) -> Read | BaseException:
    if isinstance(own, BaseException):
        return own
    if trouble is not None:
        return trouble
    return Payload(own.parts, own.arrays, ticket) if isinstance(own, Payload) else Payload((), (own,), ticket)
