"""What limits cost a request, and how exactly four gateways keep one limit together.

``python -m benchmarks limits [--requests 20000] [--json]``. A caller with all five limits, of account and key, is let
in and settled again and again on a real store (SQLite in a temporary folder); microseconds are of the thread that
runs requests. Then four gateways are asked for more than a limit of a minute allows, for minutes of a simulated clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.checks import Checks
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import Limits
from serve_app.state.owners import Owner
from serve_app.state.spending.allowance import Allowance, Worst
from serve_app.state.spending.leases import Leases, Reservation
from serve_app.state.spending.quotas import NEURONS, REQUESTS, TOKENS, Need, Quota
from serve_app.state.store.sql import SqlStore

TASK = "some-task"
MUCH = 10**12
LIMIT, GATEWAYS, OFFERED = 300, 4, 480
# A minute's begin, in unix seconds.
BEGIN = 1_795_262_400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="requests of the first part (default 20000)")
    parser.add_argument("--minutes", type=int, default=10, help="minutes of the second part (default 10)")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    arguments = parser.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder, SqlStore(Path(folder)) as store:
        store.open()
        found = {"request_us": asyncio.run(cost(store, Path(folder), arguments.requests, checks))}
        found |= overshoot(store, arguments.minutes, checks)
    found["answers_checked"] = checks.require()
    if arguments.json:
        print(json.dumps(found))
        return 0
    took = found["request_us"]
    print(f"all limits of account and key: {took['median']:.1f} us a request (median), {took['p99']:.1f} us (p99)")
    print(f"{GATEWAYS} gateways, {LIMIT} a minute, {OFFERED} came: {found['least']} to {found['most']} were let in")
    return 0


async def cost(store: SqlStore, folder: Path, requests: int, checks: Checks) -> dict[str, float]:
    """Microseconds of a request that the leases have room for: counted, reserved and settled."""
    limits = Limits(MUCH, MUCH, MUCH, MUCH, MUCH)
    caller = Caller("team-a", key="k1", limits=limits, account_limits=limits)
    worst = Worst(tokens=500, neurons=1_000_000, money=1_000_000)
    allowance = Allowance(store.leases, Owner(folder / "gateways"), by_task={TASK: MUCH})
    times = []
    for number in range(requests):
        began = time.thread_time_ns()
        headers = await allowance.request(caller, TASK)
        reservation = await allowance.reserve(caller, worst)
        reservation.settle({TOKENS: 300, NEURONS: 0})
        times.append((time.thread_time_ns() - began) / 1e3)
        checks.that("headers", headers["Ratelimit-Policy"].count("q=") == 3, "a limit is missing")
        if number % 100 == 0:
            # As requests come: exchanges with the store find time in between.
            await asyncio.sleep(0.001)
    allowance.close()
    held = [held for quota, (held, _) in allowance.leases.held().items() if not quota.is_rate]
    checks.equal("what is held at the end", held, [0] * len(held))
    times.sort()
    return {"median": statistics.median(times), "p99": times[len(times) * 99 // 100], "mean": statistics.fmean(times)}


def overshoot(store: SqlStore, minutes: int, checks: Checks) -> dict[str, float]:
    """The most and the least that four gateways let in within a minute, of more than the limit allows."""
    now = BEGIN
    gateways = [Leases(clock=lambda: now) for _ in range(GATEWAYS)]
    draw, let = random.Random(1), []
    need = [Need(Quota("team-b", "", REQUESTS), LIMIT, 1)]
    for minute in range(minutes):
        count = 0
        for number in range(OFFERED):
            now = BEGIN + 60 * minute + 60 * number / OFFERED
            place = draw.randrange(GATEWAYS)
            found = gateways[place].take(need)
            if found is None:
                with gateways[place].waiting(need):
                    gateways[place].exchange(store.leases, f"g{place}")
                    found = gateways[place].take(need)
            if isinstance(found, Reservation):
                found.settle({REQUESTS: 1})
                count += 1
            if number % 20 == 0:
                for place, gateway in enumerate(gateways):
                    gateway.exchange(store.leases, f"g{place}")
        let.append(count)
        checks.that("a minute", count <= LIMIT * 1.02, f"{count} were let in")
    return {"most": max(let), "least": min(let), "overshoot_percent": max(0, 100 * (max(let) - LIMIT) / LIMIT)}


if __name__ == "__main__":
    raise SystemExit(main())
