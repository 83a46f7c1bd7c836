"""One run: faults one after another under traffic, and what is held when all is quiet again."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.asks import small_tasks
from benchmarks.chaos.clients import PATIENCE_S, Clients
from benchmarks.chaos.faults import Fault, selected
from benchmarks.chaos.injections import NotHere
from benchmarks.chaos.target import Target
from benchmarks.chaos.weather import REFUSED, Weather, Window
from benchmarks.serving.processes import SHARED, memory_mib, running
from serve_app.state.store.sql import SqlStore

CALM_S = (0.5, 2.5)  # between two faults
SAMPLES = 20  # of memory
SAMPLE_S = 20.0  # where the time is not known
FLAT_MINUTES = 10.0
FLAT_SHARE, FLAT_MIB = 1.25, 64.0
SETTLE_S = 20.0  # after the last request, until nothing holds a place


def sdks(target: Target) -> Any:
    """Client libraries as they are, where they are installed: they come with the tests' packages."""
    try:
        from benchmarks.chaos.sdk import Sdks
    except ImportError:
        return None
    return Sdks(target.url, target.key, PATIENCE_S)


@dataclass(slots=True)
class Coming:
    """A fault that is to be injected; ``dice`` are its own."""

    fault: Fault
    dice: random.Random
    hold: float


def plan(seed: int, faults: list[Fault], together: float = 0.0) -> Iterator[list[Coming]]:
    """Faults without end: each once before any comes again, and some in twos."""
    dice, pairing, number = random.Random(seed), random.Random(f"{seed}:together"), 0
    first: list[Coming] = []
    while faults:
        for fault in dice.sample(faults, len(faults)):
            number += 1
            own = random.Random(f"{seed}:{number}:{fault.name}")
            coming = Coming(fault, own, own.uniform(*fault.hold))
            if first and not (fault.alone or fault is first[0].fault):
                yield [*first, coming]
                first = []
                continue
            if first:
                yield first
            first = [] if fault.alone or pairing.random() >= together else [coming]
            if not first:
                yield [coming]


def moments(seed: int, kills: int, requests: int) -> list[int]:
    """How many requests have been asked when each kill comes."""
    dice = random.Random(f"{seed}:moments")
    return sorted(dice.randrange(requests) for _ in range(kills))


@dataclass(slots=True)
class Begun:
    """A fault that is on. ``what``: what it hit."""

    coming: Coming
    window: Window
    injected: AbstractContextManager[str]
    what: str


class Chaos:
    """One run against one target."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self.target = target
        self.weather = Weather()
        self._sdks = sdks(target)
        # A server that runs already may not have what they ask for.
        more = small_tasks() if target.server is not None else []
        self.clients = Clients(target.url, target.key, self.weather, self._sdks, more)
        self.batches = self.clients.batches()
        self.happened: list[dict[str, Any]] = []
        self.not_here: dict[str, str] = {}
        self.memory: list[dict[str, int]] = []
        self.minutes = 0.0
        self._options = options
        # Kills that have been, where they are counted.
        self._kills = 0
        self._over = False

    async def run(self) -> None:
        await self.clients.learn()
        self.weather.started = time.monotonic()
        loops = [
            asyncio.create_task(self.clients.loop(random.Random(f"{self._options.seed}:{n}"), self._goes_on))
            for n in range(self._options.clients)
        ]
        loops.append(asyncio.create_task(self.batches.loop(random.Random(f"{self._options.seed}:b"), self._goes_on)))
        watching = asyncio.create_task(self._watch())
        try:
            await self._faults()
        except BaseException:
            self._over = True
            raise
        finally:
            await asyncio.gather(*loops)
            watching.cancel()
            self.minutes = (time.monotonic() - self.weather.started) / 60
        await self.batches.finish()
        await self._settled()
        await self.clients.again()
        self.clients.counts["looked up"] = await self.clients.books.check(self.clients.http, self.weather)
        self.clients.counts["entries"] = await asyncio.to_thread(self._check_ledger)
        await self.clients.http.aclose()
        if self._sdks is not None:
            await self._sdks.close()

    @property
    def _until(self) -> float:
        return self.weather.started + self._options.minutes * 60

    def _goes_on(self) -> bool:
        """Whether clients go on asking."""
        if self._over:
            return False
        if self._options.kills:
            return self.clients.asked < self._options.requests or self._kills < self._options.kills
        return time.monotonic() < self._until

    def _check_ledger(self) -> int:
        target = self.target
        for told in target.told:
            self.clients.receipts.note(told)
        with SqlStore(target.home, self._options.database) as store:
            alone = target.server is not None
            return self.clients.receipts.check(store, self.weather, self.batches, alone=alone)

    async def _faults(self) -> None:
        chosen = []
        for fault in selected(self._options.faults):
            if why := fault.needs(self.target):
                self.not_here[fault.name] = why
            else:
                chosen.append(fault)
        options = self._options
        calm = random.Random(f"{options.seed}:calm")
        due = moments(options.seed, options.kills, options.requests)
        for coming in plan(options.seed, chosen, options.together):
            if options.kills:
                if self._kills >= options.kills:
                    return
                while self.clients.asked < due[self._kills]:
                    await asyncio.sleep(0.01)
            else:
                pause = options.every or calm.uniform(*CALM_S)
                if time.monotonic() + pause + max(one.hold for one in coming) > self._until:
                    return
                await asyncio.sleep(pause)
            self._kills += await self._some(coming)

    async def _some(self, coming: list[Coming]) -> int:
        """Injects them, waits, lifts them, and waits until all is as before; how many there were."""
        self.target.look()
        begun, lifted = [], []
        for one in coming:
            if (found := await self._begin(one, len(coming) > 1)) is not None:
                begun.append(found)
                lifted.append(asyncio.create_task(self._lift(found)))
        if not begun:
            return 0
        # A program that runs beside the server takes its time to begin.
        first, on = begun[0].window.start, time.monotonic()
        # What two faults take together is no more than what they take one after the other.
        limit = sum(one.coming.fault.recovers_s for one in begun)
        recovery = 0.0
        if not any(one.coming.fault.stalls for one in begun):
            recovery = await self._recovery(on, begun, limit)
        await asyncio.gather(*lifted)
        recovery = max(recovery, await self._recovery(time.monotonic(), begun, limit))
        names = " with ".join(one.coming.fault.name for one in begun)
        if recovery > (limit := self._options.recovery * len(begun) or limit):
            self.weather.violation(f"recovery took {recovery} s, not {limit:.0f}", fault=names)
        over = time.monotonic()
        entry: dict[str, Any] = {"at": round(first - self.weather.started, 1), "fault": names}
        entry["what"] = ", ".join(one.what for one in begun)
        entry["hold_s"] = round(max(one.coming.hold for one in begun), 1)
        entry["recovery_s"] = recovery
        for one in begun:
            one.window.end = over + one.coming.fault.fades_s
        self.happened.append(entry)
        print(f"           back after {recovery} s; {dict(self.clients.counts)}", file=sys.stderr, flush=True)
        return len(begun)

    async def _begin(self, coming: Coming, together: bool) -> Begun | None:
        """None: it cannot be had at the moment. Of two faults at once a refusal is honest that one alone does not
        need: they may take all that could answer.
        """
        fault = coming.fault
        window = self.weather.begin(fault.name, fault.allowed | {REFUSED} if together else fault.allowed)
        injected = fault.inject(self.target, coming.dice)
        try:
            what = await asyncio.to_thread(injected.__enter__)
        except (NotHere, OSError) as why:
            # What a first fault has taken cannot be asked for its processes.
            if not together and not isinstance(why, NotHere):
                raise
            window.end = window.start
            self.not_here.setdefault(fault.name, str(why))
            return None
        except RuntimeError as wrong:
            # What an operator could not get. The run goes on, and says so in the end.
            window.end = time.monotonic()
            self.weather.violation(str(wrong), fault=fault.name)
            return None
        at = window.start - self.weather.started
        print(f"  {at:6.1f} s  {fault.name}: {what}", file=sys.stderr, flush=True)
        return Begun(coming, window, injected, what)

    async def _lift(self, begun: Begun) -> None:
        await asyncio.sleep(begun.coming.hold)
        try:
            await asyncio.to_thread(begun.injected.__exit__, None, None, None)
        except (RuntimeError, OSError) as error:
            self.weather.violation(str(error), fault=begun.coming.fault.name)

    async def _recovery(self, since: float, begun: list[Begun], limit: float) -> float:
        """Seconds until every model has answered a request that was sent afterwards."""
        last = ""
        while problem := await self.clients.round():
            if time.monotonic() - since > max(limit, 5.0) * 10:
                names = " with ".join(one.coming.fault.name for one in begun)
                raise SystemExit(f"{names}: the service does not come back: {problem}")
            if problem != last:
                print(f"           {problem[:300]}", file=sys.stderr, flush=True)
            last = problem
            await asyncio.sleep(0.1)
        return round(time.monotonic() - since, 2)

    async def _watch(self) -> None:
        """Looks at memory."""
        every = SAMPLE_S if self._options.kills else max(1.0, self._options.minutes * 60 / SAMPLES)
        while True:
            found = await asyncio.to_thread(memory_mib, self.target.pid)
            count = await asyncio.to_thread(running, self.target.pid)
            # Of one process each: how many there are changes with every kill.
            self.memory.append({name: round(mib / max(1, count[name])) for name, mib in found.items()})
            await asyncio.sleep(every)

    async def _settled(self) -> None:
        """Nothing holds a place when nobody asks."""
        until = time.monotonic() + SETTLE_S
        while True:
            try:
                held = await asyncio.to_thread(self.target.busy)
            except OSError as error:
                held = {repr(error): 1}
            if not held:
                return
            if time.monotonic() > until:
                self.weather.violation("places are still held", held=held)
                return
            await asyncio.sleep(0.5)

    def check_memory(self) -> None:
        """The last quarter of a run is no larger than its second: the first is when caches fill."""
        if self.minutes < FLAT_MINUTES or len(self.memory) < 8:
            return
        for name in set[str]().union(*self.memory) - {SHARED}:
            quarter = len(self.memory) // 4
            parts = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
            # It is not there while it is being replaced.
            early, late = ([sample[name] for sample in part if sample.get(name)] for part in parts)
            if early and late and (grew := statistics.median(late)) > statistics.median(early) * FLAT_SHARE + FLAT_MIB:
                before = statistics.median(early)
                self.weather.violation(f"memory of {name} grew from {before:.0f} to {grew:.0f} MiB a process")
