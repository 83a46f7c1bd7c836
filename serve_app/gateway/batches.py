"""What runs batches and queues: in a process of its own, over a gateway core without clients, and beside clients while
that process starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from serve_app.batch import results
from serve_app.batch.ends import Ends
from serve_app.batch.intake import Refusal, ShardPlan
from serve_app.batch.job import Done, Job, Perform
from serve_app.batch.prepare import prepare
from serve_app.batch.queues import QueueRunner, Sharer
from serve_app.batch.runner import Pace, Runner
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import endpoints
from serve_app.gateway.http.batched import performer
from serve_app.gateway.models import Models
from serve_app.gateway.pacing import pace_of
from serve_app.state.deferred.batches import Batch, Result, Waiting


class Ready:
    """A pace that lets models load first. One that has scaled to zero starts with its first request."""

    def __init__(self, pace: Pace, models: Models) -> None:
        self._pace = pace
        self._models = models

    def plan(self, waiting: Mapping[str, Waiting], now: float) -> None:
        self._pace.plan(waiting, now)

    def room(self, model: str) -> int:
        known = self._models.get(model)
        loads = known is not None and not known.ready and not known.scales_to_zero
        return 0 if loads else self._pace.room(model)

    def told(self, model: str, done: Done, seconds: float) -> None:
        self._pace.told(model, done, seconds)


# Requests of a model at once that a gateway runs beside its clients'.
BESIDE = 32
# How often it is looked whether those under way have ended.
LOOK_S = 0.02


class Few:
    """A pace of which a gateway takes little, since it has clients, and nothing more once it is ``over``."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.over = False

    def plan(self, waiting: Mapping[str, Waiting], now: float) -> None:
        self._pace.plan(waiting, now)

    def room(self, model: str) -> int:
        return 0 if self.over else min(BESIDE, self._pace.room(model))

    def told(self, model: str, done: Done, seconds: float) -> None:
        self._pace.told(model, done, seconds)


class Works:
    """Works off all batches, and all queues that are bound to models, of the gateway's store. ``clients``: the gateway
    has some, so that it takes few requests at once, and no input to be checked.
    """

    def __init__(self, gateway: Gateway, *, clients: bool = False) -> None:
        state = gateway.state
        known, sharers = pace_of(gateway), list[Sharer]()
        pace: Pace = Ready(known, gateway.models)
        perform = performer(endpoints(gateway), state.accounts.today, known.share)
        self._few: Few | None = None
        self._under_way = 0
        if clients:
            self._few = pace = Few(pace)
            perform = self._counted(perform)

        def lines(batch: Batch, found: Iterable[Result], errors: bool) -> Iterator[bytes]:
            return results.lines(batch, found, errors=errors)

        def check(batch: Batch, stop: Callable[[], bool]) -> ShardPlan | Refusal:
            return prepare(state.files, batch, gateway.known, stop=stop)

        def register(batch: Batch, output: int, errors: int) -> None:
            if batch.door == "openai":
                results.register(state.uploads, batch, output, errors, time.time())

        ends = Ends(state.batches, state.files, None if clients else check, lines, register)
        self._batches = Runner(state.batches, state.files, perform, ends, Sharer(pace, sharers))
        self._queues = QueueRunner(state.queues, perform, Sharer(pace, sharers))

    @property
    def idle_s(self) -> float:
        """For how long there has been nothing to do."""
        return min(self._batches.polls.idle_s, self._queues.polls.idle_s)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._batches.run())
            tasks.create_task(self._queues.run())

    async def drain(self) -> None:
        """Begins nothing more, of a gateway with clients, and returns when nothing is under way: what is ended half
        done is run again from its beginning.
        """
        assert self._few is not None
        self._few.over = True
        while self._under_way:
            await asyncio.sleep(LOOK_S)

    def _counted(self, perform: Perform) -> Perform:
        async def counted(job: Job) -> Done:
            self._under_way += 1
            try:
                return await perform(job)
            finally:
                self._under_way -= 1

        return counted

    def wake(self) -> None:
        """There may be something to do."""
        self._batches.wake()
        self._queues.polls.wake()

    def release(self) -> None:
        """Lets others have what is under way. Blocks; for who ends without an event loop."""
        self._batches.release()
