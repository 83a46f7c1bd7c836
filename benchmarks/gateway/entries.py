"""What keys, prices, limits and the ledger add to a request, in microseconds of the processor.

``python -m benchmarks entries [--requests 2000] [--rounds 9] [--fsync] [--json]``. Pieces of work begin and end as the
gateway has them, with nothing between, on a real store (SQLite in a temporary folder): once with all of that and once
without. ``loop_us`` is of the thread that runs requests, ``process_us`` of all threads, the journal's and the store's
among them; both are the difference between the two. ``end_ms`` is how long an answer's end waits for its entry.
``--fsync`` has the journal synced, as ``SERVE_APP_LEDGER_FSYNC`` does. It ends with status 1 where an end waits for
longer than a millisecond, or the thread's part is more than 3 % of what a request takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.checks import Checks
from serve_app.catalog.load import load_catalog
from serve_app.catalog.price_list import Prices
from serve_app.gateway.booking import Booking
from serve_app.gateway.models import Models
from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.spending.usage import UsageQuery
from serve_app.state.state import State
from serve_app.tasks.model import ServedModel
from serve_app.tasks.work import Runtime, Settlement

MODEL, KEY = "@cf/pico/pico-instruct", "a key of this benchmark alone"
# Requests under way at the same time.
WIDTH = 32
# Of requests one after another, for which the end is measured.
ALONE = 300
TARGET_MS = 1.0
# Of what our own code takes of a gateway for a whole answer (`benchmarks/results/gateway-cpu-2026-11-21.md`): a strict
# measure, since the process with Serve and HTTP takes several times as much (`benchmarks tracing` measures that).
TARGET_PERCENT = 3.0
REQUEST_US = 340.0


class Side:
    """One way to run requests: ``run(name)`` is one of them; ``drained``: whether nothing of them is under way."""

    def __init__(self, name: str, run: Callable[[str], Awaitable[None]], drained: Callable[[], bool]) -> None:
        self.name = name
        self.run = run
        self._drained = drained
        self.loop_us: list[float] = []
        self.process_us: list[float] = []

    async def round(self, number: int, requests: int) -> None:
        names = iter(range(requests))

        async def client() -> None:
            for each in names:
                await self.run(f"{self.name}-{number}-{each}")

        loop, process = time.thread_time_ns(), time.process_time_ns()
        await asyncio.gather(*(client() for _ in range(WIDTH)))
        self.loop_us.append((time.thread_time_ns() - loop) / 1e3 / requests)
        # What brings entries to the store belongs to the round that made them.
        while not self._drained():
            await asyncio.sleep(0.01)
        self.process_us.append((time.process_time_ns() - process) / 1e3 / requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of a round (default 2000)")
    parser.add_argument("--rounds", type=int, default=9, help="of each side, by turns (default 9)")
    parser.add_argument("--fsync", action="store_true", help="sync the journal")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), asked.requests, asked.rounds, asked.fsync))
    if asked.json:
        print(json.dumps(found))
    else:
        print(f"a request: {found['loop_us']:.1f} us of its thread, {found['process_us']:.1f} us of all")
        print(f"its share of {REQUEST_US:g} us: {found['loop_percent']:.1f} % and {found['process_percent']:.1f} %")
        print(f"an end waits {found['end_ms']:.3f} ms (median), {found['end_p99_ms']:.3f} ms (p99)")
    return int(found["end_ms"] > TARGET_MS or found["loop_percent"] > TARGET_PERCENT)


async def measure(folder: Path, requests: int, rounds: int, fsync: bool = False) -> dict[str, float]:
    """Figures of both sides, after the ledger has been asked whether it has every request once."""
    catalog, checks = load_catalog(), Checks()
    [model] = Models(catalog, "local", (MODEL,), folder)
    state = State(folder, "local", (hash_key(KEY),), fsync=fsync)
    await state.start()
    waits: list[float] = []
    with_ = Side("with", charged(state, model, catalog.prices(), waits), lambda: not state.ledger.waiting)
    without = Side("without", free(model), lambda: True)
    for number in range(rounds + 1):
        for side in (with_, without) if number % 2 else (without, with_):
            await side.round(number, requests)
    alone: list[float] = []
    one = charged(state, model, catalog.prices(), alone)
    for number in range(ALONE):
        await one(f"alone-{number}")
    while state.ledger.waiting:
        await asyncio.sleep(0.01)
    page = await state.usage.sums(UsageQuery(0, 2**31, "local"))
    checks.equal("entries", sum(row.entries for row in page.rows), requests * (rounds + 1) + len(alone))
    checks.equal("lost", state.ledger.lost, 0)
    state.close()
    # The first round makes what the others find.
    loop = [a - b for a, b in zip(with_.loop_us[1:], without.loop_us[1:], strict=True)]
    process = [a - b for a, b in zip(with_.process_us[1:], without.process_us[1:], strict=True)]
    alone.sort()
    found = {"loop_us": statistics.median(loop), "process_us": statistics.median(process)}
    found |= {f"{name}_percent": 100 * found[f"{name}_us"] / REQUEST_US for name in ("loop", "process")}
    found |= {"end_ms": statistics.median(alone) * 1e3, "end_p99_ms": alone[len(alone) * 99 // 100] * 1e3}
    found |= {"end_busy_ms": statistics.median(waits) * 1e3, "request_us": REQUEST_US, "fsync": float(fsync)}
    return found | {"answers_checked": checks.require()}


def charged(state: State, model: ServedModel, prices: Prices, waits: list[float]) -> Callable[[str], Awaitable[None]]:
    """As a gateway has it."""
    settlement = Settlement()
    runtime = Runtime(
        nothing,
        nothing,  # type: ignore[arg-type]
        settlement,
        10**6,
        prices=prices,
        check=state.ledger.check,
        book=Booking(settlement, state.ledger),
        allowance=state.allowance,
    )

    async def run(name: str) -> None:
        caller = state.accounts.find(KEY)
        assert caller is not None
        await state.allowance.request(caller, model.record.task)
        ended = await work(runtime, model, caller, name)
        waits.append(time.perf_counter() - ended)

    return run


def free(model: ServedModel) -> Callable[[str], Awaitable[None]]:
    """The same work without keys, prices, limits and entries."""
    runtime, caller = Runtime(nothing, nothing, Settlement(), 10**6), Caller("local")  # type: ignore[arg-type]

    async def run(name: str) -> None:
        await work(runtime, model, caller, name)
        # The other side waits for its entry; a turn of the loop is no part of what that costs.
        await asyncio.sleep(0)

    return run


async def work(runtime: Runtime, model: ServedModel, caller: Caller, name: str) -> float:
    """A piece of work that uses some tokens; when it had ended."""
    worst = {"input_tokens": 300, "output_tokens": 100}
    async with runtime.work(model, caller, request_id=name, worst=worst) as one:
        one.usage.prompt_tokens, one.usage.cached_tokens, one.usage.completion_tokens = 300, 256, 100
        ended = time.perf_counter()
    return ended


async def nothing(*_: object) -> None:
    raise AssertionError("no worker was to be called")


if __name__ == "__main__":
    raise SystemExit(main())
