"""What ranks keep for the pool and from it, and that nothing of it stays behind: two shelves and rank 0's reader in one
process.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import numpy as np
import pytest

from serve_app.kv.chunk import BadChunk
from serve_app.kv.parts import Parted, Payload
from serve_app.kv.reading import ElsewhereFailed, ObjectReader
from serve_app.parallel import shelf as shelves
from serve_app.parallel.shelf import Shelf
from serve_app.wire.parts import Part, Run
from serve_app.worker.rank_store import RankReader, hold
from tests.waiting import until

DATA = np.arange(64, dtype=np.uint8)
FIRST, SECOND = Part((Run(0, 1, 0, 1, 1, 1),)), Part((Run(0, 1, 1, 1, 1, 1),))


class Object:
    """In the place of a reference: it comes when it may, or fails."""

    def __init__(self, error: BaseException | None = None, comes: bool = True) -> None:
        self.error, self.comes = error, asyncio.Event()
        if comes:
            self.comes.set()

    def __await__(self) -> Any:
        yield from self.comes.wait().__await__()
        if self.error is not None:
            raise self.error
        return DATA


class Actor:
    """A rank's, whose calls wait until it may answer."""

    def __init__(self) -> None:
        self.shelf, self.answers, self.seen = Shelf(1 << 20), asyncio.Event(), []
        self.answers.set()
        self.hold = self

    def remote(self, tickets: list[int], values: list[Any], timeout_s: float) -> Any:
        async def answer() -> list[str]:
            self.seen.append(values)
            await self.answers.wait()
            return await hold(self.shelf, tickets, values, timeout_s)

        # A call goes on whatever becomes of the caller.
        return asyncio.shield(asyncio.ensure_future(answer()))


class World:
    def __init__(self) -> None:
        self.actor = Actor()
        self.reader = RankReader(
            [(self.actor, lambda part: part == SECOND)], ObjectReader(lambda part: part == FIRST), self.actor.shelf.drop
        )

    async def read(self, *values: Any, within: float = 5.0) -> list[Any]:
        return await self.reader.read(values, time.monotonic() + within)

    async def is_empty(self) -> bool:
        gc.collect()
        return self.actor.shelf.look()[3] == 0


async def test_what_nobody_needs_any_more_goes_from_every_rank():
    world = World()
    whole, parted = await world.read(Object(), Parted((FIRST, SECOND), (Object(), Object())))
    assert isinstance(whole, Payload) and whole.one_piece and parted.parts == (FIRST,)
    assert world.actor.shelf.held(whole.ticket).one_piece
    assert world.actor.shelf.held(parted.ticket).parts == (SECOND,)
    # A rank is told of the parts that it needs alone.
    assert world.actor.seen[0][1].parts == (SECOND,)
    assert world.actor.shelf.look()[3] == 2
    ticket = whole.ticket
    del whole
    await until(lambda: gc.collect() is not None and world.actor.shelf.look()[3] == 1)
    with pytest.raises(KeyError):
        world.actor.shelf.held(ticket)
    del parted
    await until(world.is_empty)


async def test_a_rank_that_fails_takes_its_chunk_along_and_no_other():
    world = World()
    bad = Parted((FIRST, SECOND), (Object(), Object(ValueError("its store is full"))))
    found = await world.read(bad, Object())
    assert isinstance(found[0], ElsewhereFailed) and isinstance(found[1], Payload)
    from ray.exceptions import ObjectLostError

    lost = Parted((FIRST, SECOND), (Object(), Object(ObjectLostError("aa", None, ""))))
    assert isinstance((await world.read(lost))[0], BadChunk)
    own = Parted((FIRST, SECOND), (Object(ValueError("own")), Object()))
    assert isinstance((await world.read(own))[0], ValueError)
    del found
    await until(world.is_empty)


async def test_a_rank_that_answers_too_late_keeps_nothing():
    world = World()
    world.actor.answers.clear()
    [found] = await world.read(Object(), within=0.05)
    assert isinstance(found, TimeoutError)
    await asyncio.sleep(2 * 0.05)  # what is of no use is told
    world.actor.answers.set()
    await until(world.is_empty)
    await asyncio.sleep(0.05)
    assert await world.is_empty()


@pytest.mark.parametrize("heard", [True, False])
async def test_a_read_that_is_cancelled_leaves_nothing(heard):
    """Whether the rank has begun with it or not."""
    world = World()
    slow = Object(comes=False)
    if not heard:
        world.actor.answers.clear()
    reading = asyncio.ensure_future(world.read(slow))
    await until(lambda: world.actor.seen)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(2 * 0.05)
    slow.comes.set()
    world.actor.answers.set()
    await until(world.is_empty)
    await asyncio.sleep(0.05)
    assert await world.is_empty()


def test_what_the_pool_does_not_want_goes_with_time(monkeypatch):
    shelf = Shelf(200)
    monkeypatch.setattr(shelves, "LEFT_S", 0.0)
    shelf.give("a", 64, lambda: DATA)
    assert shelf.look()[2] == 0 and shelf.look()[3] == 0
    began = time.monotonic()
    shelf.drop([1, 2, 3])
    shelf.look()
    shelf.look()
    assert shelf._unwanted == {} and time.monotonic() >= began


def test_parts_beyond_the_limit_are_not_waited_for():
    shelf = Shelf(130)
    for name in "abc":
        shelf.give(name, 64, lambda: DATA)
    with pytest.raises(KeyError):
        shelf.take("a", wait_s=1e6)
    shelf.forget(["b", "still to come"])
    for name in ("b", "still to come"):
        with pytest.raises(KeyError):
            shelf.take(name, wait_s=1e6)
    assert np.array_equal(shelf.take("c"), DATA) and shelf.look()[:3] == (64, 0, 0)
    with pytest.raises(KeyError):
        shelf.take("c", wait_s=0.0)
    shelf.give("a", 64, lambda: DATA)
    assert np.array_equal(shelf.take("a"), DATA)
