"""A shard that a runner has in hand: what of it is ready, under way, and waits to be written."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from serve_app.batch.job import Job
from serve_app.state.deferred.batches import Claim, Result, ShardResults
from serve_app.state.spending.ledger import Entry


class InHand:
    """``left``: requests without a result in the store. ``over``: the batch is to be ended, nothing more is begun."""

    def __init__(self, claim: Claim, jobs: Iterable[Job], left: int) -> None:
        self.key = (claim.batch.id, claim.shard.number)
        self.epoch = claim.epoch
        self.model = claim.shard.model
        self.account = claim.batch.caller.account
        self.ready = deque(jobs)
        self.left = left
        self.tasks: set[asyncio.Task[None]] = set()
        self.results: list[tuple[Result, list[Entry]]] = []
        self.over = False
        self._delayed: set[asyncio.TimerHandle] = set()

    @property
    def rests_s(self) -> float:
        """For how long nothing of it can be done; 0: something can, or waits to be written."""
        if self.ready or self.tasks or self.results or not self._delayed or len(self._delayed) < self.left:
            return 0.0
        return min(handle.when() for handle in self._delayed) - asyncio.get_running_loop().time()

    def later(self, seconds: float, job: Job, ready: Callable[[], None], *, at_fault: bool = False) -> None:
        """Has the request tried once more after so long; ``ready`` is told."""

        def due() -> None:
            self._delayed.discard(handle)
            if not self.over:
                self.ready.append(replace(job, tries=job.tries + 1, faults=job.faults + at_fault))
                ready()

        handle = asyncio.get_running_loop().call_later(seconds, due)
        self._delayed.add(handle)

    def take(self) -> ShardResults | None:
        """What is to be written now."""
        if not self.results:
            return None
        taken, self.results = self.results, []
        entries = [entry.row() for _, entries in taken for entry in entries]
        return ShardResults(*self.key, self.epoch, [result for result, _ in taken], entries)

    async def stop(self) -> None:
        """Ends what is under way; results that are there stay."""
        self.over = True
        self.ready.clear()
        for handle in self._delayed:
            handle.cancel()
        self._delayed.clear()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
