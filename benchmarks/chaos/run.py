"""One run: faults one after another under traffic, and what is held when all is quiet again."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.chaos.clients import Clients
from benchmarks.chaos.faults import Fault, selected
from benchmarks.chaos.injections import NotHere
from benchmarks.chaos.target import Target
from benchmarks.chaos.weather import Weather
from benchmarks.serving.processes import SHARED, memory_mib
from serve_app.state.store.sql import SqlStore

CALM_S = (0.5, 2.5)  # between two faults
GRACE_S = 1.0  # what had begun to fail when the service was back
SAMPLES = 20  # of memory
FLAT_MINUTES = 10.0
FLAT_SHARE, FLAT_MIB = 1.25, 64.0
SETTLE_S = 20.0  # after the last request, until nothing holds a place


def plan(seed: int, faults: list[Fault]) -> Iterator[tuple[Fault, random.Random]]:
    """Faults without end: each once before any comes again. Each has dice of its own."""
    dice, number = random.Random(seed), 0
    while faults:
        for fault in dice.sample(faults, len(faults)):
            number += 1
            yield fault, random.Random(f"{seed}:{number}:{fault.name}")


class Chaos:
    """One run against one target."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self.target = target
        self.weather = Weather()
        self.clients = Clients(target.url, target.key, self.weather)
        self.happened: list[dict[str, Any]] = []
        self.not_here: dict[str, str] = {}
        self.memory: list[dict[str, int]] = []
        self._options = options

    async def run(self) -> None:
        await self.clients.learn()
        self.weather.started = started = time.monotonic()
        until = started + self._options.minutes * 60
        loops = [
            asyncio.create_task(
                self.clients.loop(random.Random(f"{self._options.seed}:{n}"), lambda: time.monotonic() < until)
            )
            for n in range(self._options.clients)
        ]
        watching = asyncio.create_task(self._watch(until))
        try:
            await self._faults(until)
        finally:
            await asyncio.gather(*loops)
            watching.cancel()
        await self._settled()
        await self.clients.again()
        self.clients.counts["looked up"] = await self.clients.books.check(self.clients.http, self.weather)
        self.clients.counts["entries"] = await asyncio.to_thread(self._check_ledger)
        await self.clients.http.aclose()

    def _check_ledger(self) -> int:
        target = self.target
        with SqlStore(target.home, self._options.database) as store:
            return self.clients.receipts.check(store, self.weather, alone=target.server is not None)

    async def _faults(self, until: float) -> None:
        chosen = []
        for fault in selected(self._options.faults):
            if why := fault.needs(self.target):
                self.not_here[fault.name] = why
            else:
                chosen.append(fault)
        for fault, dice in plan(self._options.seed, chosen):
            calm = self._options.every or dice.uniform(*CALM_S)
            hold = dice.uniform(*fault.hold)
            if time.monotonic() + calm + hold > until:
                return
            await asyncio.sleep(calm)
            await self._one(fault, hold, dice)

    async def _one(self, fault: Fault, hold: float, dice: random.Random) -> None:
        """Injects it, waits, lifts it, and waits until all is as before."""
        self.target.look()
        window = self.weather.begin(fault.name, fault.allowed)
        entry: dict[str, Any] = {"at": round(window.start - self.weather.started, 1), "fault": fault.name}
        injected = fault.inject(self.target, dice)
        try:
            entry["what"] = await asyncio.to_thread(injected.__enter__)
        except NotHere as why:
            window.end = window.start
            self.not_here.setdefault(fault.name, str(why))
            return
        print(f"  {entry['at']:6.1f} s  {fault.name}: {entry['what']}", file=sys.stderr, flush=True)
        lifted = asyncio.create_task(self._lift(injected, hold, entry))
        if not fault.stalls:
            entry["recovery_s"] = await self._recovery(window.start, fault)
        await lifted
        if fault.hold[1]:
            entry["hold_s"] = round(hold, 1)
        since = time.monotonic()
        recovery = await self._recovery(since, fault)
        entry["recovery_s"] = max(recovery, entry.get("recovery_s", 0.0))
        if entry["recovery_s"] > (limit := self._options.recovery or fault.recovers_s):
            self.weather.violation(f"recovery took {entry['recovery_s']} s, not {limit:.0f}", fault=fault.name)
        window.end = time.monotonic() + GRACE_S
        self.happened.append(entry)
        print(
            f"           back after {entry['recovery_s']} s; {dict(self.clients.counts)}", file=sys.stderr, flush=True
        )

    async def _lift(self, injected: Any, hold: float, entry: dict[str, Any]) -> None:
        await asyncio.sleep(hold)
        try:
            await asyncio.to_thread(injected.__exit__, None, None, None)
        except (RuntimeError, OSError) as error:
            self.weather.violation(str(error), fault=entry["fault"])

    async def _recovery(self, since: float, fault: Fault) -> float:
        """Seconds until every model has answered a request that was sent afterwards."""
        last = ""
        while problem := await self.clients.round():
            if time.monotonic() - since > max(fault.recovers_s, 5.0) * 10:
                raise SystemExit(f"{fault.name}: the service does not come back: {problem}")
            if problem != last:
                print(f"           {problem[:300]}", file=sys.stderr, flush=True)
            last = problem
            await asyncio.sleep(0.1)
        return round(time.monotonic() - since, 2)

    async def _watch(self, until: float) -> None:
        """Looks at memory."""
        begin = time.monotonic()
        while True:
            found = await asyncio.to_thread(memory_mib, self.target.pid)
            self.memory.append({name: round(mib) for name, mib in found.items()})
            await asyncio.sleep(max(1.0, (until - begin) / SAMPLES))

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
        if self._options.minutes < FLAT_MINUTES or len(self.memory) < 8:
            return
        quarter = len(self.memory) // 4
        for name in self.memory[-1]:
            early = statistics.median(sample.get(name, 0) for sample in self.memory[quarter : 2 * quarter])
            late = statistics.median(sample.get(name, 0) for sample in self.memory[-quarter:])
            if name != SHARED and early and late > early * FLAT_SHARE + FLAT_MIB:
                self.weather.violation(f"memory of {name} grew from {early:.0f} to {late:.0f} MiB")
