"""Queries of usage over a year of a million requests a day, made up as the ledger's sums.

python -m benchmarks usage [--json] [--weeks 52] [--requests 1000000] [--database URL [--filled]]

Accounts, keys and models are used unevenly, as they are: a few do most, and the small ones not in every hour. A week is
drawn, and the others are copies of it. Days are closed as gateways do it. Each query goes the way of the API, its
answer is compared with sums that were kept while the rows were drawn, and it is timed. `--database` takes an empty
PostgreSQL, or with `--filled` one that an earlier run has filled; without one it is a file of SQLite, which is reported
and not held to the target.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.checks import Checks
from serve_app.catalog.tasks import declared
from serve_app.gateway.usage.read import MAX_PER_PAGE, counted
from serve_app.state.spending.ledger import DAY_S, HOUR_S
from serve_app.state.spending.usage import Order, UsageQuery
from serve_app.state.store.spending.closing import CLOSE_AFTER_S
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import UNIT_COLUMNS, ledger_closed, ledger_days, ledger_hours

ACCOUNTS, MODELS = 120, 12
# 2025-01-01T00:00:00Z.
START = 1_735_689_600
STATUSES = (("done", 0.96), ("left", 0.03), ("failed", 0.01))
TARGET_MS = 200.0
REPEATS = 7
_LARGEST, _SMALL = "account0", f"account{ACCOUNTS // 2}"


@dataclass(slots=True, frozen=True)
class Source:
    """Somebody's use of a model: ``weight`` is its share of all requests."""

    account: str
    key: str
    model: str
    weight: float


@dataclass(slots=True)
class Made:
    """What a week's rows add up to: entries by account, and by day of the week and account, and neurons of all; how
    many rows there are in all, and how long it took to close the days.
    """

    entries: Counter[str] = field(default_factory=Counter)
    daily: Counter[tuple[int, str]] = field(default_factory=Counter)
    neurons: int = 0
    closing_s: float = 0.0
    hour_rows: int = 0
    day_rows: int = 0


@dataclass(slots=True, frozen=True)
class Case:
    """``entries``: what the rows of the answer must add up to."""

    name: str
    query: UsageQuery
    entries: int


def sources(draw: random.Random) -> list[Source]:
    """Accounts by Zipf's law, with one to five keys each, and each key with one to four models."""
    found = []
    for number in range(ACCOUNTS):
        for key in range(draw.randint(1, 5)):
            for model in draw.sample(range(MODELS), draw.randint(1, 4)):
                weight = draw.expovariate(1.0) / (number + 1) / (model + 1)
                found.append(Source(f"account{number}", f"{number:06d}{key:06d}", f"@cf/made/model-{model}", weight))
    whole = sum(source.weight for source in found)
    return [Source(s.account, s.key, s.model, s.weight / whole) for s in found]


def week(requests: int, made: Made) -> Iterator[tuple[sa.Table, list[dict[str, Any]]]]:
    """Rows of the first week, an hour's or a day's at a time."""
    draw = random.Random(16)
    known = sources(draw)
    # More in the middle of a day than at night.
    shares = [1.6 - 0.6 * abs(hour - 13) / 13 for hour in range(24)]
    for day in range(START // DAY_S, START // DAY_S + 7):
        days: dict[tuple[str, ...], dict[str, Any]] = {}
        for hour, share in enumerate(shares):
            hours = []
            for source in known:
                mean = requests * source.weight * share / sum(shares)
                for status, part in STATUSES:
                    if count := _poisson(draw, mean * part):
                        row = _row(draw, source, status, count)
                        hours.append({"hour": day * 24 + hour, **row})
                        _add(days.setdefault((source.key, source.model, status), {}), row)
                        made.entries[source.account] += count
                        made.daily[day - START // DAY_S, source.account] += count
                        made.neurons += row["neurons"]
            yield ledger_hours, hours
        yield ledger_days, [{"day": day, **row} for row in days.values()]


def fill(store: SqlStore, weeks: int, requests: int, *, filled: bool = False) -> Made:
    """Writes all rows, unless an earlier run has ``filled`` the store with them; the sums are those of one week."""
    made = Made()
    rows: dict[str, list[dict[str, Any]]] = {ledger_hours.name: [], ledger_days.name: []}
    for table, some in week(requests, made):
        rows[table.name] += some
    made.hour_rows, made.day_rows = len(rows[ledger_hours.name]) * weeks, len(rows[ledger_days.name]) * weeks
    if filled:
        return made
    with store.database.writing() as connection:
        # As if the store had been made then.
        connection.execute(sa.update(ledger_closed).values(until=START // DAY_S))
    for table, length in ((ledger_hours, HOUR_S), (ledger_days, DAY_S)):
        period = table.primary_key.columns[0]
        others = [column for column in table.columns if column is not period]
        with store.database.writing() as connection:
            connection.execute(sa.insert(table), rows[table.name])
        first = START // length + 7 * DAY_S // length
        for number in range(1, weeks):
            later = sa.select((period + number * 7 * DAY_S // length).label(period.name), *others).where(period < first)
            with store.database.writing() as connection:
                connection.execute(sa.insert(table).from_select([period, *others], later))
    began = time.monotonic()
    until = START + weeks * 7 * DAY_S
    while store.ledger.close_days(until + CLOSE_AFTER_S):
        pass
    made.closing_s = time.monotonic() - began
    with store.database.unprepared() as connection:
        # What a database does by itself within minutes.
        connection.execute(sa.text("ANALYZE"))
    return made


def cases(made: Made, weeks: int) -> list[Case]:
    """The questions of an account, and of the operator."""
    until = START + weeks * 7 * DAY_S
    last_week = until - 7 * DAY_S
    days = [sum(n for (day, _), n in made.daily.items() if day == weekday) for weekday in range(7)] * weeks
    all_, largest, small = sum(made.entries.values()), made.entries[_LARGEST], made.entries[_SMALL]
    top = (Order("neurons", True),)

    # Of the days by account one page, as large as the API gives them.
    daily = [made.daily[place] for place in sorted(made.daily)] * weeks

    def asked(since: int, account: str | None, width: Any, *by: Any, order: tuple[Order, ...]) -> UsageQuery:
        dimensions = (*by, "currency")
        return UsageQuery(since, until, account, width, dimensions, units=counted(), order=order, limit=MAX_PER_PAGE)

    def year(account: str | None, width: Any, *by: Any, order: tuple[Order, ...] = (Order(),)) -> UsageQuery:
        return asked(START, account, width, *by, order=order)

    return [
        Case("a year of the largest account by month", year(_LARGEST, "month"), largest * weeks),
        Case("a year of the largest account by day", year(_LARGEST, DAY_S), largest * weeks),
        Case("a year of a small account by day and key", year(_SMALL, DAY_S, "key"), small * weeks),
        Case("a year of the largest account by key", year(_LARGEST, None, "key", order=top), largest * weeks),
        Case("a year of everybody by model", year(None, None, "model", order=top), all_ * weeks),
        Case("a year of everybody by month", year(None, "month"), all_ * weeks),
        Case("a year of everybody by account", year(None, None, "account", order=top), all_ * weeks),
        Case("a year of everybody by key", year(None, None, "account", "key", order=top), all_ * weeks),
        Case("a year of everybody by day", year(None, DAY_S), all_ * weeks),
        Case("a year of everybody by day and account", year(None, DAY_S, "account"), sum(daily[:MAX_PER_PAGE])),
        Case(
            "a week of the largest account by hour",
            asked(last_week, _LARGEST, HOUR_S, order=(Order(),)),
            largest,
        ),
        Case(
            "a month of everybody by key",
            asked(until - 30 * DAY_S, None, None, "account", "key", order=top),
            sum(days[-30:]),
        ),
        Case(
            "a week of everybody by hour",
            asked(last_week, None, HOUR_S, order=(Order(),)),
            all_,
        ),
    ]


def measure(store: SqlStore, asked: list[Case], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each query. Raises :class:`SystemExit` for a wrong answer."""
    found, checks = {}, Checks()
    for case in asked:
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            page = store.usage.sums(case.query)
            times.append((time.perf_counter() - began) * 1e3)
            checks.equal(case.name, sum(row.entries for row in page.rows), case.entries)
        # The first one reads what the others find in memory.
        found[case.name] = {
            "median_ms": round(statistics.median(times[1:] or times), 1),
            "first_ms": round(times[0], 1),
        }
        found[case.name]["rows"] = page.total
    checks.require()
    return found


def _row(draw: random.Random, source: Source, status: str, count: int) -> dict[str, Any]:
    read, wrote = int(count * draw.uniform(400, 1600)), int(count * draw.uniform(80, 320))
    row: dict[str, Any] = {"account": source.account, "key": source.key, "model": source.model, "status": status}
    row |= {"task": next(iter(declared())), "adapter": "", "batch": "", "currency": "USD"}
    row |= dict.fromkeys(UNIT_COLUMNS, 0) | {"entries": count, "seconds": count * draw.uniform(0.5, 4.0)}
    row |= {"input_tokens": read, "cached_tokens": int(read * draw.random() * 0.6), "output_tokens": wrote}
    return row | {"neurons": (read + 8 * wrote) * 4119, "money": (read + 8 * wrote) * 45}


def _add(total: dict[str, Any], row: dict[str, Any]) -> None:
    for name, value in row.items():
        total[name] = value if isinstance(value, str) else total.get(name, 0) + value


def _poisson(draw: random.Random, mean: float) -> int:
    if mean > 30:
        return max(0, round(draw.gauss(mean, math.sqrt(mean))))
    least, found, product = math.exp(-mean), 0, draw.random()
    while product > least:
        found, product = found + 1, product * draw.random()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks usage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weeks", type=int, default=52, help="of usage (default 52)")
    parser.add_argument("--requests", type=int, default=1_000_000, help="a day (default 1,000,000)")
    parser.add_argument("--database", help="an empty PostgreSQL (default: a file of SQLite)")
    parser.add_argument("--filled", action="store_true", help="an earlier run has filled the database")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, SqlStore(Path(folder), asked.database) as store:
        store.open()
        began = time.monotonic()
        made = fill(store, asked.weeks, asked.requests, filled=asked.filled)
        filled = time.monotonic() - began
        times = measure(store, cases(made, asked.weeks), REPEATS)
        held = not store.database.is_sqlite
    slowest = max(found["median_ms"] for found in times.values())
    told = {"database": "postgresql" if held else "sqlite", "weeks": asked.weeks, "requests_a_day": asked.requests}
    told |= {"hour_rows": made.hour_rows, "day_rows": made.day_rows, "filled_s": round(filled, 1)}
    told |= {"closing_s": round(made.closing_s, 1), "load": round(os.getloadavg()[0], 2)}
    told |= {"slowest_ms": slowest, "target_ms": TARGET_MS, "queries": times}
    if asked.json:
        print(json.dumps(told))
    else:
        print(f"{made.hour_rows:,} sums of hours and {made.day_rows:,} of days in {told['database']}, {filled:.0f} s")
        for name, found in times.items():
            print(f"{found['median_ms']:8.1f} ms  {found['rows']:6} rows  {name}")
    return int(held and slowest > TARGET_MS)


if __name__ == "__main__":
    raise SystemExit(main())
