"""Both ends of a batch: its input is checked and cut into shards, and its results are put into files.

Each is one batch at a time in a runner, on a thread, claimed like a shard, and done again by another where it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec
import orjson

from serve_app.batch.asking import ask
from serve_app.batch.loops import PollLoop
from serve_app.state.blobs.files import Files, NoFile
from serve_app.state.deferred.batches import Batch, BatchStore, Outcome, Result, unpack

log = logging.getLogger("ray.serve")

# How often inputs and ends are looked for, what was left behind, and whether a batch was cancelled while it is checked.
TURN_S = 0.5
IDLE_S = 2.0
SWEEP_S = 15.0
LOOK_S = 0.5
# How often checking an input is tried that fails for no reason of its own.
MAX_TRIES = 3
_PAGE = 1000

# Checks a batch's input and writes its shards. Blocks; ends early, in whatever way, where the second argument says so.
Check = Callable[[Batch, Callable[[], bool]], Any]
# Lines of the output, or with ``errors`` of the file of errors.
Lines = Callable[[Batch, Iterable[Result], bool], Iterator[bytes]]
# Told of the two files' lengths in bytes (0: there is none) before the batch has ended.
Register = Callable[[Batch, int, int], None]


class Ends:
    """``check`` None: inputs are left to others."""

    def __init__(
        self,
        store: BatchStore,
        files: Files,
        check: Check | None,
        lines: Lines,
        register: Register = lambda batch, output, errors: None,
    ) -> None:
        self._store = store
        self._files = files
        self._check = check
        self._lines = lines
        self._register = register
        self._inputs, self._ends = PollLoop(), PollLoop()
        self._stops = False
        # How many inputs are being checked, and results put into files.
        self._doing = 0
        # Told when an input has been checked, so that there may be requests to run.
        self.on_checked: Callable[[], None] = self.wake

    @property
    def busy(self) -> bool:
        return bool(self._doing)

    def wake(self) -> None:
        self._inputs.wake()
        self._ends.wake()

    async def run(self, owner: str, claim_until: Callable[[], tuple[float, float]]) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if (check := self._check) is not None:
                    tasks.create_task(self._inputs.run(lambda: self._input(check, owner, claim_until)))
                tasks.create_task(self._ends.run(lambda: self._end(owner, claim_until)))
                tasks.create_task(self._sweep())
        finally:
            self._stops = True

    async def _input(self, check: Check, owner: str, claim_until: Callable[[], tuple[float, float]]) -> float:
        batch = await ask(self._store.claim_input, owner, *claim_until())
        if batch is None:
            return IDLE_S
        self._doing += 1
        left = False
        look = asyncio.ensure_future(self._left(batch))

        def stop() -> bool:
            return self._stops or look.done()

        try:
            found = None
            for _ in range(MAX_TRIES):
                try:
                    found = await ask(check, batch, stop)
                    break
                except Exception as error:
                    if left := look.done():
                        break
                    log.error("the input of batch %s could not be checked", batch.id, exc_info=error)
            now = claim_until()[0]
            if left:
                log.info("batch %s was ended while it was checked", batch.id)
            elif found is None:
                problem = {"code": "server_error", "message": "The server could not check this batch.", "line": None}
                await ask(self._store.refused, owner, batch.id, orjson.dumps([{**problem, "param": None}]), now)
            elif hasattr(found, "problems"):
                await ask(self._store.refused, owner, batch.id, found.problems, now)
            elif not await ask(self._store.planned, owner, batch.id, found.shards, found.wrong, now):
                left = True
            if left:
                await ask(self._leave, batch)
            self.on_checked()
        finally:
            look.cancel()
            self._doing -= 1
        return 0.0

    def _leave(self, batch: Batch) -> None:
        """Takes back what was written of a batch that has ended meanwhile."""
        known = self._store.find(batch.caller.account, batch.id)
        if known is None or known.ended is not None:
            self._files.delete_below(f"batches/{batch.id}/shards")

    async def _left(self, batch: Batch) -> None:
        """Ends when nobody needs the input checked any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            known = await ask(self._store.find, batch.caller.account, batch.id)
            if known is None or known.status != "validating":
                return

    async def _end(self, owner: str, claim_until: Callable[[], tuple[float, float]]) -> float:
        batch = await ask(self._store.claim_end, owner, *claim_until())
        if batch is None:
            return IDLE_S
        self._doing += 1
        try:
            if await ask(self._finish, owner, batch, lambda: claim_until()[0]):
                await ask(self._clear, batch.id)
        except Exception as error:
            # Its claim lapses, and it is tried again.
            log.error("the results of batch %s could not be put into files", batch.id, exc_info=error)
            await asyncio.sleep(TURN_S)
        finally:
            self._doing -= 1
        return 0.0

    async def _sweep(self) -> None:
        """Puts away what runners left behind that ended over it."""
        while True:
            for batch_id in await ask(self._store.uncleared):
                await ask(self._clear, batch_id)
            await asyncio.sleep(SWEEP_S)

    def _finish(self, owner: str, batch: Batch, now: Callable[[], float]) -> bool:
        """Writes the files, and ends the batch; False: somebody else has it."""
        if batch.counts.cancelled or batch.counts.expired:
            outcome: Outcome = "cancelled" if batch.cancelling is not None else "expired"
            for shard in self._store.shards(batch.id):
                try:
                    requests = unpack(self._files.get(shard.blob))
                except (NoFile, msgspec.DecodeError) as error:
                    log.error("shard %s of batch %s is lost (%s)", shard.number, batch.id, error)
                    continue
                rest = [Result(one.number, one.id, outcome, 0, b"") for one in requests]
                if not self._store.fill(owner, batch.id, rest):
                    return False
        output, errors = (self._put(batch, name, name == "errors") for name in ("output", "errors"))
        self._register(batch, output[1], errors[1])
        return self._store.end(owner, batch.id, output[0], errors[0], now()) is not None

    def _put(self, batch: Batch, name: str, errors: bool) -> tuple[str, int]:
        """The blob's name and length; "" and 0 where there would be no line in it."""
        lines = self._lines(batch, self._results(batch.id), errors)
        if (first := next(lines, None)) is None:
            return "", 0
        blob = f"batches/{batch.id}/{name}.jsonl"
        return blob, self._files.put(blob, chain([first], lines))

    def _results(self, batch_id: str) -> Iterator[Result]:
        after = -1
        while page := self._store.results(batch_id, after, _PAGE):
            yield from page
            after = page[-1].number

    def _clear(self, batch_id: str) -> None:
        """Drops shards and results of a batch that has ended."""
        self._files.delete_below(f"batches/{batch_id}/shards")
        self._store.clear(batch_id)
