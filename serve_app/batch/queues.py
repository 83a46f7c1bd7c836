"""What works off queues that are bound to models: takes messages, runs them, and writes each answer as it is finished.

Like the runner of batches, all of this is safe to lose at any moment: a message whose lease ends is taken by another
runner, and an answer counts only while its lease holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from serve_app.batch.asking import ask
from serve_app.batch.job import Done, Job, Perform
from serve_app.batch.loops import GroupLoop, PollLoop, backoff
from serve_app.batch.runner import Pace
from serve_app.state.deferred.batches import Request, Waiting
from serve_app.state.deferred.queues import Answered, QueueStore, Task
from serve_app.state.errors import Away

log = logging.getLogger("ray.serve")

# For how long a runner has messages that it does not renew, and how often it renews them.
LEASE_S = 15.0
RENEW_S = 3.0
# How often the store is asked for work: while there is some, and while there is none.
TURN_S = 0.1
IDLE_S = 1.0
# Answers that end within so many seconds are written together.
GROUP_S = 0.03
MAX_HELD = 512
# The wait before another try, and the longest.
BACKOFF_S, MAX_BACKOFF_S = 1.0, 300.0
# Attempts beyond those of its consumer after which a message is given up that runners were lost over.
MAX_LOSSES = 10


class Sharer:
    """One runner's part of a pace that several share: what they have to do is planned together, and the room of a model
    is divided among those who have work for it.
    """

    def __init__(self, pace: Pace, sharers: list[Sharer]) -> None:
        self._pace = pace
        self._sharers = sharers
        self._waiting: Mapping[str, Waiting] = {}
        sharers.append(self)

    def plan(self, waiting: Mapping[str, Waiting], now: float) -> None:
        self._waiting = waiting
        together: dict[str, Waiting] = {}
        for sharer in self._sharers:
            for model, more in sharer._waiting.items():
                known = together.get(model)
                if known is not None:
                    more = Waiting(known.requests + more.requests, min(known.deadline, more.deadline))
                together[model] = more
        self._pace.plan(together, now)

    def room(self, model: str) -> int:
        others = sum(model in sharer._waiting for sharer in self._sharers if sharer is not self)
        return -(-self._pace.room(model) // (1 + others))

    def told(self, model: str, done: Done, seconds: float) -> None:
        self._pace.told(model, done, seconds)


class QueueRunner:
    """``clock``: unix seconds, as other runners have them too."""

    def __init__(
        self,
        store: QueueStore,
        perform: Perform,
        pace: Pace,
        *,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._perform = perform
        self._pace = pace
        self._clock = clock
        self._lease_s = lease_s
        self._held: dict[str, asyncio.Task[None]] = {}
        self._running: Counter[str] = Counter()
        self._answered: list[Answered] = []
        self.polls = PollLoop()
        self._groups = GroupLoop()
        # For the operator: requests that were tried, and those that went to somebody else meanwhile.
        self.tries = self.lost = 0

    async def run(self) -> None:
        """Works until it is cancelled; then it writes what is done, and leaves the rest to others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.polls.run(self._turn))
                tasks.create_task(self._renewals())
                tasks.create_task(self._groups.run(GROUP_S, self._write))
        finally:
            for task in self._held.values():
                task.cancel()
            await asyncio.gather(*self._held.values(), return_exceptions=True)
            with suppress(TimeoutError, Away):
                async with asyncio.timeout(self._lease_s / 2):
                    await asyncio.shield(asyncio.to_thread(self._leave))

    def _leave(self) -> None:
        if self._answered:
            self._store.answer(self._answered, self._clock())
        self._store.renew(list(self._held), self._clock())

    async def _turn(self) -> float:
        now = self._clock()
        waiting = await ask(self._store.waiting, now)
        self._pace.plan(waiting, now)
        if waiting or self._held:
            self.polls.worked()
        room = {model: self._pace.room(model) - self._running[model] for model in waiting}
        taken = 0
        for model in waiting:
            limit = min(room[model], MAX_HELD - len(self._held))
            if limit <= 0:
                continue
            tasks = await ask(self._store.take, [model], limit, self._clock(), self._clock() + self._lease_s)
            taken += len(tasks)
            for task in tasks:
                self._begin(task)
        if taken:
            return 0.0
        return TURN_S if waiting or self._held else IDLE_S

    def _begin(self, task: Task) -> None:
        model = task.consumer.model
        self._running[model] += 1
        running = asyncio.get_running_loop().create_task(self._try(task))
        self._held[task.message.lease] = running

        def ended(_: asyncio.Task[None]) -> None:
            self._running[model] -= 1
            self.polls.wake()

        running.add_done_callback(ended)

    async def _try(self, task: Task) -> None:
        message, consumer = task.message, task.consumer
        began = time.monotonic()
        if message.attempts > consumer.retries + MAX_LOSSES:
            done = Done(500, _error(8005, "The request was given up: whoever ran it was lost, again and again."))
        else:
            try:
                done = await self._perform(job_of(task))
            except Exception as error:
                log.error("message %s could not be run", message.id, exc_info=error)
                done = Done(500, _error(8005, "The server failed."), [], BACKOFF_S, True)
        self.tries += 1
        self._pace.told(consumer.model, done, time.monotonic() - began)
        if done.retry_after is not None and not (done.at_fault and message.attempts > consumer.retries):
            least = max(done.retry_after, consumer.delay_s)
            wait = backoff(least, message.attempts - 1, BACKOFF_S, MAX_BACKOFF_S)
            await ask(self._store.again, task, self._clock() + wait, counts=done.at_fault)
            self._held.pop(message.lease, None)
            return
        rows = [entry.row() for entry in done.entries]
        failed = not 200 <= done.status < 300
        self._answered.append(Answered(task, answer_of(task, done), rows, dead=failed))
        self._groups.tell()

    async def _write(self) -> None:
        group, self._answered = self._answered, []
        if group:
            written = await ask(self._store.answer, group, self._clock())
            self.lost += len(group) - len(written)
            for each in group:
                self._held.pop(each.task.message.lease, None)

    async def _renewals(self) -> None:
        while True:
            await asyncio.sleep(min(RENEW_S, self._lease_s / 4))
            if not (held := list(self._held)):
                continue
            still = await ask(self._store.renew, held, self._clock() + self._lease_s)
            for lease in held:
                if lease not in still and (running := self._held.get(lease)) is not None and not running.done():
                    # Somebody else has it.
                    self._held.pop(lease, None)
                    self.lost += 1
                    running.cancel()


def job_of(task: Task) -> Job:
    """The native call of the model that the queue is bound to. The ledger has it under the queue's id."""
    message, account = task.message, task.caller.account
    url = f"/client/v4/accounts/{account}/ai/run/{task.consumer.model}"
    number = int(message.id[:15], 16)
    request, tries = Request(number, None, url, message.body), message.attempts - 1
    return Job(message.queue, request, task.caller, message.sent, tries, alone=True)


def answer_of(task: Task, done: Done) -> bytes:
    """The answer as a message: the envelope of `ai/run`, with `request_id` (the id of the message that asked), `status`
    (of HTTP) and the request's `external_reference`.
    """
    reference = None
    with suppress(msgspec.DecodeError):
        asked = msgspec.json.decode(task.message.body)
        reference = asked.get("external_reference") if isinstance(asked, dict) else None
    told = {"request_id": task.message.id, "external_reference": reference, "status": done.status}
    try:
        body = msgspec.json.decode(done.body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        body = {"result": msgspec.Raw(msgspec.json.encode({})), "success": msgspec.Raw(b"false")}
    return msgspec.json.encode({**told, **body})


def _error(code: int, message: str) -> bytes:
    error = {"code": code, "message": message}
    return msgspec.json.encode({"result": {}, "success": False, "errors": [error], "messages": []})
