"""Faults by seed under mixed traffic whose answers are known: nothing wrong, nothing hangs, nothing stays behind.

    python -m benchmarks chaos [--seed 1] [--minutes 10] [--clients 12] [--database URL] [--json]
    python -m benchmarks chaos --faults gateway-killed --every 45 --minutes 3      # only this, every 45 seconds
    python -m benchmarks chaos --faults none --minutes 30                          # no faults: traffic and memory
    python -m benchmarks chaos --list                                              # all faults

Clients ask in every dialect and of every task, whole and in streams, and some leave in the middle. Every answer was
learned from the quiet server, where dialects must agree; it must come again, token for token and with the same usage,
whatever happens. A request must end within a minute, with its answer or, where a fault allows it, with an honest
refusal (429 or 503 with Retry-After) or a broken connection; what had been shown by then must be its beginning. After
each fault every model must answer within 5 seconds, but for the gateway and for what needs a new start. In the
end nothing may hold a place, every answer must come once more, the newest answers must be in the books (their traces
with their tokens, stored responses with their texts), memory must not have grown (runs of 10 minutes and more) and
the server must leave no process and no folder behind.

A seed gives the same faults in the same order. It starts a server with a state directory of its own, or takes the one
with ``--home``, without the faults that end it. ``--database`` is an empty PostgreSQL database; it is reached through
a proxy that hangs up, says nothing or is slow. Ends with status 1 if anything broke, and says how to run it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from benchmarks.chaos.clients import Clients
from benchmarks.chaos.faults import FAULTS, Fault, NotHere
from benchmarks.chaos.network import Proxy
from benchmarks.chaos.target import Target
from benchmarks.chaos.weather import Weather
from benchmarks.serving.processes import SHARED, memory_mib
from benchmarks.serving.stack import Server, running_stack

CALM_S = (0.5, 2.5)  # between two faults
GRACE_S = 1.0  # what had begun to fail when the service was back
SAMPLES = 20  # of memory
FLAT_MINUTES = 10.0
FLAT_SHARE, FLAT_MIB = 1.25, 64.0
SETTLE_S = 20.0  # after the last request, until nothing holds a place
POOL_BYTES = "256MiB"


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
        await self.clients.http.aclose()

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


def selected(names: str) -> list[Fault]:
    """``all``, ``none``, names with commas, or ``all,-NAME`` for all but some. Raises :class:`SystemExit` for an
    unknown one.
    """
    known = {fault.name: fault for fault in FAULTS}
    chosen: dict[str, Fault] = {}
    for word in names.split(","):
        if word == "all":
            chosen |= known
        elif word.removeprefix("-") not in (*known, "none"):
            raise SystemExit(f"no such fault: {word}; --list shows all")
        elif word.startswith("-"):
            chosen.pop(word[1:], None)
        elif word != "none":
            chosen[word] = known[word]
    return list(chosen.values())


@contextlib.contextmanager
def own_target(options: argparse.Namespace, wrong: list[str]) -> Iterator[Target]:
    """A server with a state directory of its own; ``wrong`` gets what was wrong with its end."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        home, proxy = Path(scratch) / "home", None
        home.mkdir(mode=0o700)
        # What was fetched or compiled for the user's own server serves here as well; nothing else is shared.
        kept = Path(os.environ.get("SERVE_APP_HOME") or "~/.serve_app").expanduser()
        for name in ("weights", "kernels"):
            if (kept / name).exists():
                (home / name).symlink_to(kept / name)
        environment = {"SERVE_APP_HOME": str(home), "SERVE_APP_OBJECT_STORE_BYTES": POOL_BYTES}
        if options.database:
            database = make_url(options.database)
            proxy = Proxy(database.host or "127.0.0.1", database.port or 5432)
            through = database.set(host="127.0.0.1", port=proxy.port)
            environment["SERVE_APP_DATABASE"] = through.render_as_string(hide_password=False)
        clock = home / "clock" if options.faketime else None
        if clock is not None:
            clock.write_text("+0\n")
            environment |= {"LD_PRELOAD": str(options.faketime), "FAKETIME_TIMESTAMP_FILE": str(clock)}
            environment |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        server = Server(options.port, **environment)
        target = Target(server.url, server.key, home, 0, server, proxy, clock)
        try:
            server.start()
            target.pid = server.pid
            yield target
            wrong += target.stop()
        finally:
            server.stop()
            if proxy is not None:
                proxy.close()


@contextlib.contextmanager
def running_target(home: Path) -> Iterator[Target]:
    found = running_stack(home)
    yield Target(found.url, found.key, home, found.pid)


def chaos(options: argparse.Namespace) -> dict[str, Any]:
    wrong: list[str] = []
    with running_target(options.home) if options.home else own_target(options, wrong) as target:
        run = Chaos(target, options)
        try:
            asyncio.run(run.run())
        except KeyboardInterrupt:
            run.weather.violation("interrupted")
        run.check_memory()
    for what in wrong:
        run.weather.violation(what)
    return {
        "benchmark": "chaos",
        "seed": options.seed,
        "minutes": options.minutes,
        "store": "postgresql" if options.database else "sqlite",
        "replay": replay(options),
        "broken": run.weather.broken,
        "broke": run.weather.broke,
        "wrong": run.clients.counts["WRONG"],
        "counts": dict(run.clients.counts),
        "faults": run.happened,
        "slowest_recovery_s": slowest(run.happened),
        "not_here": run.not_here,
        "memory_mib": {name: [m.get(name, 0) for m in run.memory] for name in sorted(set().union(*run.memory))},
    }


def slowest(happened: list[dict[str, Any]]) -> dict[str, float]:
    """The longest recovery of each fault, longest first."""
    found: dict[str, float] = {}
    for entry in happened:
        found[entry["fault"]] = max(entry["recovery_s"], found.get(entry["fault"], 0.0))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def replay(options: argparse.Namespace) -> str:
    """The command that does the same again; no password of a database."""
    words = ["python -m benchmarks chaos", f"--seed {options.seed}", f"--minutes {options.minutes:g}"]
    words += [f"--clients {options.clients}", f"--faults {options.faults}"]
    words += [f"--every {options.every:g}"] if options.every else []
    words += ["--database URL"] if options.database else []
    words += ["--faketime LIBRARY"] if options.faketime else []
    return " ".join(words)


def shown() -> Iterator[str]:
    for fault in FAULTS:
        seen = " or ".join(sorted(fault.allowed)) or "a pause"
        yield f"{fault.name:24} {fault.does}. Clients may see: {seen}; back within {fault.recovers_s:.0f} s"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--faults", default="all", help="all, none, names with commas, or all,-NAME for all but some")
    parser.add_argument("--every", type=float, default=0, metavar="S", help="seconds between faults, else by the seed")
    parser.add_argument(
        "--recovery", type=float, default=0, metavar="S", help="bound of all recoveries, on a slow machine"
    )
    parser.add_argument("--database", help="URL of an empty PostgreSQL database, instead of SQLite")
    parser.add_argument("--faketime", type=Path, metavar="LIBRARY", help="libfaketimeMT.so.1, for a clock that jumps")
    parser.add_argument("--port", type=int, default=8125)
    parser.add_argument("--home", type=Path, help="take the server that runs with this state directory")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(shown()))
        return 0
    selected(options.faults)
    found = chaos(options)
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json:
        print(json.dumps(found))
    if not found["counts"].get("streams"):
        raise SystemExit("no stream has been complete")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
