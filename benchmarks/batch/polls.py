"""What a poll asks of a store that has many finished batches: one batch by its id, and a page of them."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.trace.measure import quantile

MOST_MS = 5.0
ACCOUNTS, POLLS, PAGE, GROUP = 50, 1000, 20, 1000


def polls(count: int, checks: Checks, database: str | None = None) -> dict[str, Any]:
    """Times in ms with ``count`` finished batches, in a SQLite of its own or in an empty ``database``; ``cpu``: of the
    processor alone, whatever else the machine does.
    """
    from serve_app.state.store.sql import SqlStore

    with tempfile.TemporaryDirectory(prefix="serve-app-bench-") as home, SqlStore(Path(home), database) as store:
        store.open()
        fill(store, count)
        rng = random.Random(0)

        def one() -> None:
            number = rng.randrange(count)
            found = store.batches.find(account(number), name(number))
            checks.that("a batch", found is not None and found.id == name(number), "it is not the one asked for")

        def page() -> None:
            whose = account(rng.randrange(count))
            found = store.batches.page(whose, ("openai",), limit=PAGE)
            checks.that("a page", bool(found) and all(each.caller.account == whose for each in found), "not theirs")

        times = {"poll": _times(one, POLLS), "page": _times(page, POLLS // 10)}
    return {"batches": count} | {
        f"{what}{kind}_p{round(100 * q)}_ms": round(1e3 * quantile(values, q), 2)
        for what, both in times.items()
        for kind, values in zip(("", "_cpu"), both, strict=True)
        for q in (0.5, 0.99)
    }


def fill(store: Any, count: int) -> None:
    """Finished batches of several accounts, as they lie there."""
    import sqlalchemy as sa

    from serve_app.state.callers.accounts import Caller
    from serve_app.state.deferred.batches import Batch, Counts
    from serve_app.state.store.deferred.batch_shards import columns_of
    from serve_app.state.store.deferred.batch_tables import batches

    now, keep_s = time.time(), 29 * 86_400.0
    ended = {"open": 0, "owner": "", "until": 0.0}
    for start in range(0, count, GROUP):
        rows = [
            columns_of(
                Batch(
                    name(number),
                    "openai",
                    Caller(account(number)),
                    now - number,
                    now,
                    keep_s,
                    "completed",
                    counts=Counts(10, 10),
                    output=f"batches/{name(number)}/output.jsonl",
                    ended=now,
                )  # fmt: skip
            )
            | {"expires": now + keep_s, **ended}
            for number in range(start, min(start + GROUP, count))
        ]
        with store.database.writing() as connection:
            connection.execute(sa.insert(batches), rows)


def name(number: int) -> str:
    return f"{number:032x}"


def account(number: int) -> str:
    return f"account-{number % ACCOUNTS}"


def _times(ask: Callable[[], None], count: int) -> tuple[list[float], list[float]]:
    """Seconds that have passed, and seconds of the processor."""
    wall, cpu = [], []
    for _ in range(count):
        began, used = time.perf_counter(), time.thread_time()
        ask()
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - used)
    return wall, cpu
