"""What works batches off: claims shards, runs their requests, and writes results under its claims.

::

    store --claim--> shards in hand --feed--> Perform, so many at once as `Pace` says
                                                 \\-> results, a group at a time --write--> store
    store --renew, each second--> which shards are still ours, and which are to be ended

All of this is safe to lose at any moment. What was written counts; what was not is run again by whoever claims the
shard next, and a runner that comes back with an old claim can write nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from serve_app.batch.asking import ask
from serve_app.batch.ends import Ends
from serve_app.batch.hand import InHand
from serve_app.batch.job import Done, Job, Perform
from serve_app.batch.loops import GroupLoop, PollLoop, backoff
from serve_app.state.blobs.files import Files, NoFile
from serve_app.state.deferred.batches import BatchStore, Claim, Outcome, Result, ShardResults, Used, Waiting, unpack
from serve_app.state.errors import Away

log = logging.getLogger("ray.serve")

# For how long a claim holds that nobody renews, and how often claims are renewed.
LEASE_S = 10.0
RENEW_S = 1.0
# How often the store is asked for work: while there is some, and while there is none.
TURN_S = 0.25
IDLE_S = 1.0
# Results that end within so many seconds are written together.
GROUP_S = 0.04
# Shards in hand at most, and results that wait for the store before no more requests are begun.
MAX_SHARDS = 256
MAX_UNWRITTEN = 2000
# A shard of which nothing can be tried for longer is given back.
REST_S = 5.0
# Tries of a request that may itself be at fault, and the longest wait before another try of any.
MAX_FAULTS = 3
BACKOFF_S, MAX_BACKOFF_S = 0.5, 60.0


class Pace(Protocol):
    """How many requests run at once."""

    def plan(self, waiting: Mapping[str, Waiting], now: float) -> None:
        """What all runners still have to do, by model; told some times a second."""

    def room(self, model: str) -> int:
        """Requests of the model that this runner may have under way now."""

    def told(self, model: str, done: Done, seconds: float) -> None:
        """A request has ended, this time."""


class Runner:
    """``ends`` checks inputs and writes files. ``clock``: unix seconds, as other runners have them too."""

    def __init__(
        self,
        store: BatchStore,
        files: Files,
        perform: Perform,
        ends: Ends,
        pace: Pace,
        *,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
    ) -> None:
        self.owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._store = store
        self._files = files
        self._perform = perform
        self._ends = ends
        ends.on_checked = self.wake
        self._pace = pace
        self._clock = clock
        self._lease_s = lease_s
        self._hand: dict[tuple[str, int], InHand] = {}
        self._running: Counter[str] = Counter()
        self._unwritten = 0
        self.polls = PollLoop()
        self._groups = GroupLoop()
        self._stops = False
        self._waiting: Mapping[str, Waiting] = {}
        self._asked = float("-inf")
        self._of_account: Counter[str] = Counter()
        # Claimed, and not in hand yet; accounts and models that are left alone for a while; whether the last claim
        # found something.
        self._arriving: set[tuple[str, int]] = set()
        self._resting: dict[tuple[str, str], float] = {}
        self._there = False
        # For the operator: requests that were tried, and shards that went to somebody else.
        self.tries = self.lost = 0

    def wake(self) -> None:
        """There may be something to do."""
        self._asked = float("-inf")
        self.polls.wake()
        self._ends.wake()

    async def run(self) -> None:
        """Works until it is cancelled; then it writes what is done, and leaves the rest to others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.polls.run(self._turn))
                tasks.create_task(self._renewals())
                tasks.create_task(self._groups.run(GROUP_S, self._write))
                tasks.create_task(self._ends.run(self.owner, self._claim_until))
        finally:
            self._stops = True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 2):
                    await asyncio.shield(self._leave())

    async def _leave(self) -> None:
        for shard in list(self._hand.values()):
            await shard.stop()
        with suppress(Away):
            parts = [part for shard in self._hand.values() if (part := shard.take()) is not None]
            if parts:
                await asyncio.to_thread(self._store.write, self.owner, parts)
            await asyncio.to_thread(self._store.release, self.owner)

    def release(self) -> None:
        """Lets others have what is in hand, at once. Blocks; for who ends without an event loop."""
        self._stops = True
        with suppress(Away):
            self._store.release(self.owner)

    def _claim_until(self) -> tuple[float, float]:
        now = self._clock()
        return now, now + self._lease_s

    # -- shards
    # ---------------------------------------------------------------------------------------------------------

    async def _turn(self) -> float:
        if time.monotonic() - self._asked >= TURN_S or not self._waiting:
            self._asked = time.monotonic()
            self._waiting = await ask(self._store.waiting)
            self._pace.plan(self._waiting, self._clock())
        if self._waiting or self._hand or self._ends.busy:
            self.polls.worked()
        self._there = await self._claim([model for model in self._waiting if model])
        self._feed()
        if self._there:
            return 0.0
        return TURN_S if self._waiting or self._hand else IDLE_S

    def _wants(self, model: str) -> int:
        """How many more requests of the model should be in hand."""
        ready = sum(len(shard.ready) for shard in self._hand.values() if shard.model == model)
        return self._pace.room(model) - self._running[model] - ready

    async def _claim(self, models: list[str]) -> bool:
        """Whether there was something to claim, so that there may be more."""
        wanted = {model: wants for model in models if (wants := self._wants(model)) > 0}
        if not wanted or len(self._hand) >= MAX_SHARDS or self._unwritten >= MAX_UNWRITTEN:
            return False
        now, until = self._claim_until()
        self._resting = {pair: rests for pair, rests in self._resting.items() if rests > time.monotonic()}
        limit, requests = MAX_SHARDS - len(self._hand), sum(wanted.values())
        claim, resting = self._store.claim, list(self._resting)
        claims = await ask(claim, self.owner, now, until, wanted, limit, requests=requests, resting=resting)
        self._arriving.update((one.batch.id, one.shard.number) for one in claims)
        for one in claims:
            await self._begin(one)
        return bool(claims)

    async def _begin(self, claim: Claim) -> None:
        key = (claim.batch.id, claim.shard.number)
        if (old := self._hand.get(key)) is not None:
            # The clock was moved, and our own claim had lapsed.
            await self._drop(old)
        jobs: list[Job] = []
        left = claim.shard.requests - claim.done
        try:
            requests = await ask(lambda: unpack(self._files.get(claim.shard.blob)))
        except (NoFile, msgspec.DecodeError) as error:
            # Nobody can run it; what is known of its batch is given at its deadline.
            log.error("shard %s of batch %s is lost (%s)", claim.shard.number, claim.batch.id, error)
        else:
            numbers = [request.number for request in requests]
            done = await ask(self._store.done, claim.batch.id, numbers) if claim.done else ()
            batch = claim.batch
            model = claim.shard.model
            jobs = [
                Job(batch.id, one, batch.caller, batch.created, model=model)
                for one in requests
                if one.number not in done
            ]
            left = len(jobs)
        shard = self._hand[key] = InHand(claim, jobs, left)
        self._arriving.discard(key)
        if not left:
            await self._finish(shard)
        self._feed()

    def _feed(self) -> None:
        """Begins as many requests as there is room for: of the account that has the fewest under way."""
        if self._stops or self._unwritten >= MAX_UNWRITTEN:
            return
        models: dict[str, list[InHand]] = {}
        for shard in self._hand.values():
            if shard.ready:
                models.setdefault(shard.model, []).append(shard)
        for model, shards in models.items():
            room = self._pace.room(model) - self._running[model]
            while room > 0 and shards:
                shard = min(shards, key=lambda shard: self._of_account[shard.account])
                self._start(shard, shard.ready.popleft())
                room -= 1
                if not shard.ready:
                    shards.remove(shard)

    def _start(self, shard: InHand, job: Job) -> None:
        self._running[shard.model] += 1
        self._of_account[shard.account] += 1
        task = asyncio.get_running_loop().create_task(self._try(shard, job))
        shard.tasks.add(task)
        task.add_done_callback(lambda task: self._ended(shard, task))

    def _ended(self, shard: InHand, task: asyncio.Task[None]) -> None:
        shard.tasks.discard(task)
        self._running[shard.model] -= 1
        self._of_account[shard.account] -= 1
        if not self._of_account[shard.account]:
            del self._of_account[shard.account]
        self._feed()
        if self._there and self._wants(shard.model) > 0:
            self.polls.wake()

    async def _try(self, shard: InHand, job: Job) -> None:
        began = time.monotonic()
        try:
            done = await self._perform(job)
        except Exception as error:
            log.error("request %s of batch %s could not be run", job.request.number, job.batch, exc_info=error)
            done = Done(500, b'{"error":{"message":"The server failed.","type":"server_error"}}', [], BACKOFF_S, True)
        self.tries += 1
        self._pace.told(shard.model, done, time.monotonic() - began)
        wait = _pause(job, done)
        if wait is None:
            shard.results.append((_result(job, done), done.entries))
            self._unwritten += 1
            self._groups.tell()
        elif not shard.over:
            shard.later(wait, job, self._feed, at_fault=done.at_fault)

    async def _drop(self, shard: InHand) -> None:
        """Somebody else has it, or has had it: nothing that is left of it counts."""
        self.lost += 1
        if self._hand.get(shard.key) is shard:
            del self._hand[shard.key]
        await shard.stop()
        self._unwritten -= len(shard.results)
        shard.results.clear()

    # -- claims
    # ---------------------------------------------------------------------------------------------------------

    async def _renewals(self) -> None:
        while True:
            await asyncio.sleep(min(RENEW_S, self._lease_s / 4))
            hand = dict(self._hand)
            held = await ask(self._store.renew, self.owner, *self._claim_until())
            ends = {(one.batch, one.shard, one.epoch): one.ends for one in held}
            for key, shard in hand.items():
                found = ends.pop((*key, shard.epoch), None)
                if self._hand.get(key) is not shard:
                    continue
                if found is None:
                    await self._drop(shard)
                elif found and not shard.over:
                    # What runs is ended where it runs; what is done counts.
                    await shard.stop()
                    self._groups.tell()
                elif shard.rests_s > REST_S:
                    await self._rest(shard)
            for batch_id, number, epoch in ends:
                # Claimed by us, as the store has it, and we do not know of it.
                if (batch_id, number) not in self._hand and (batch_id, number) not in self._arriving:
                    await ask(self._store.give_back, self.owner, batch_id, number, epoch)

    async def _rest(self, shard: InHand) -> None:
        """All that is left of it is to be tried later: then its place is for others."""
        self._resting[(shard.account, shard.model)] = time.monotonic() + shard.rests_s
        del self._hand[shard.key]
        await ask(self._store.give_back, self.owner, *shard.key, shard.epoch)
        await shard.stop()

    # -- results
    # ---------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        hand = list(self._hand.values())
        parts: list[ShardResults] = []
        for shard in hand:
            if (part := shard.take()) is not None:
                parts.append(part)
        if parts:
            refused = await ask(self._store.write, self.owner, parts)
            self._unwritten -= sum(len(part.results) for part in parts)
            for part in parts:
                found = self._hand.get((part.batch, part.shard))
                if found is None or found.epoch != part.epoch:
                    continue
                if found.key in refused:
                    await self._drop(found)
                else:
                    found.left -= len(part.results)
        for shard in hand:
            over = shard.over and not shard.tasks and not shard.results
            if self._hand.get(shard.key) is shard and (over or not shard.left):
                await self._finish(shard)
        self._feed()

    async def _finish(self, shard: InHand) -> None:
        batch_id, number = shard.key
        await ask(self._store.finish, self.owner, batch_id, number, shard.epoch, self._clock())
        if self._hand.get(shard.key) is shard:
            del self._hand[shard.key]
        self.wake()


def _pause(job: Job, done: Done) -> float | None:
    """Seconds before the request is tried again; None: this is its result."""
    if done.retry_after is None or (done.at_fault and job.faults + 1 >= MAX_FAULTS):
        return None
    return backoff(done.retry_after, job.tries, BACKOFF_S, MAX_BACKOFF_S)


def _result(job: Job, done: Done) -> Result:
    used = Used(
        sum(entry.units.get("input_tokens", 0) for entry in done.entries),
        sum(entry.units.get("cached_tokens", 0) for entry in done.entries),
        sum(entry.units.get("output_tokens", 0) for entry in done.entries),
        sum(entry.neurons for entry in done.entries),
        sum(entry.money for entry in done.entries),
        next((entry.currency for entry in done.entries if entry.currency), ""),
    )
    request = job.request
    outcome: Outcome = "succeeded" if 200 <= done.status < 300 else "failed"
    return Result(request.number, request.id, outcome, done.status, done.body, job.request_id, used)
