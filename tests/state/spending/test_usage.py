"""Usage: sums over any time, by anything, equal to what adding up all entries gives, on both databases."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec import structs

from serve_app.state.spending.ledger import DAY_S, HOUR_S, Entry
from serve_app.state.spending.usage import Order, UsageQuery, moment, months
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger_days, ledger_hours
from tests.state.spending.days import begin, close_days
from tests.variants import some

# 2026-01-30T00:00:00Z: the days around it lie in three months.
START = 1_769_731_200
DAYS = 32
NOW = START + DAYS * DAY_S + 5000.0


def entries(count: int, seed: int = 1) -> list[Entry]:
    draw = random.Random(seed)
    found = []
    for number in range(count):
        read = draw.randrange(1, 10_000)
        # Some at the very edges of hours and days.
        at = float(draw.choice([draw.uniform(START, NOW), START + draw.randrange(DAYS * 24) * HOUR_S]))
        found.append(
            Entry(
                id=f"{number:08x}",
                account=draw.choice(["a", "b"]),
                key=draw.choice(["k1", "k2", "k3"]),
                at=at,
                seconds=draw.random(),
                model=draw.choice(["@cf/m/one", "@cf/m/two"]),
                task=draw.choice(["text-generation", "text-embeddings"]),
                status=draw.choice(["done", "left", "failed"]),
                units={"input_tokens": read, "cached_tokens": read // 2, "output_tokens": draw.randrange(99)},
                neurons=draw.randrange(10**9),
                money=draw.randrange(10**12),
                currency=draw.choice(["USD", "EUR"]),
                batch=draw.choice(["", "", "batch1"]),
            )
        )
    return found


ENTRIES = entries(400)


@pytest.fixture(params=some(["open", "closed", "late"], "late"))
def usage(store: SqlStore, request: pytest.FixtureRequest) -> Iterator[Any]:
    """With every entry in days that are not closed, or before most days are closed, or every other one only after."""
    begin(store, START - DAY_S)
    step = {"open": 1, "closed": 1, "late": 2}[request.param]
    store.write([entry.row() for entry in ENTRIES[::step]])
    if request.param != "open":
        close_days(store, NOW)
        store.write([entry.row() for entry in ENTRIES])
    store.usage._clock = lambda: NOW
    yield store.usage


def truth(query: UsageQuery) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """All entries, one by one."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0, 0])
    for entry in ENTRIES:
        fits = query.since <= entry.at < query.until and query.account in (None, entry.account)
        fits = fits and all(getattr(entry, name) in values for name, values in query.only.items())
        if not fits or any(getattr(entry, name) in values for name, values in query.but.items()):
            continue
        place: list[Any] = [getattr(entry, name) for name in query.by]
        if query.width == "month":
            place.insert(0, max(month for month in months(START, int(NOW)) if month <= entry.at))
        elif query.width is not None:
            place.insert(0, int(entry.at // query.width) * query.width)
        numbers = [entry.units[n] for n in ("input_tokens", "cached_tokens", "output_tokens")]
        sums = found[tuple(place)]
        found[tuple(place)] = [a + b for a, b in zip(sums, [1, *numbers, entry.neurons, entry.money], strict=True)]
    return {place: tuple(sums) for place, sums in found.items()}


def told(usage: Any, query: UsageQuery) -> dict[tuple[Any, ...], tuple[int, ...]]:
    page = usage.sums(query)
    assert page.total == len(page.rows)
    rows = {}
    for row in page.rows:
        place = (*([] if row.at is None else [row.at]), *(row.dimensions[name] for name in query.by))
        units = [row.units.get(n, 0) for n in ("input_tokens", "cached_tokens", "output_tokens")]
        assert place not in rows
        rows[place] = (row.entries, *units, row.neurons, row.money)
    return rows


def test_sums_are_those_of_all_entries(usage):
    draw = random.Random(2)
    dimensions = ["account", "key", "model", "task", "status", "currency", "batch"]
    # What sums of closed days are kept by.
    coarse, of_accounts = ["model", "task", "status", "currency"], ["account", "currency"]
    moments = [
        START - 5,
        START,
        START + 1,
        START + HOUR_S,
        START + DAY_S,
        START + DAY_S + 1,
        int(NOW) - 1,
        int(NOW) + 9,
    ]
    for _ in range(30):
        ends = [draw.choice([*moments, draw.randrange(START, int(NOW))]) for _ in range(2)]
        query = UsageQuery(
            since=min(ends),
            until=max(ends),
            account=draw.choice([None, None, "a", "nobody"]),
            width=draw.choice([None, None, HOUR_S, DAY_S, DAY_S, "month", 7 * DAY_S, 900]),
            by=tuple(draw.sample(draw.choice([dimensions, coarse]), draw.randrange(4)))
            if draw.random() < 0.8
            else tuple(draw.sample(of_accounts, draw.randrange(3))),
            only=draw.choice([{}, {}, {"model": ("@cf/m/one", "none")}, {"batch": ("",), "key": ("k1",)}]),
            but=draw.choice([{}, {}, {"status": ("failed",)}]),
            limit=5000,
        )
        assert told(usage, query) == truth(query), query


def test_of_closed_days_the_coarse_sums_are_read(store, usage, request):
    """Without the others the answers are the same: of everybody by day and hour, of accounts by day, and of an account
    by whole months.
    """
    if request.node.callspec.params["usage"] == "open":
        pytest.skip("nothing is closed")
    closed = START + (DAYS - 1) * DAY_S
    month = START + 2 * DAY_S
    everybody = UsageQuery(START, closed + 700, None, DAY_S, ("model", "status"), limit=5000)
    asked = [everybody, replace(everybody, width=HOUR_S), replace(everybody, width=None, by=("task",))]
    asked += [replace(everybody, since=month, until=month + 28 * DAY_S, width=width, by=("account", "key", "batch"),
                      but={"account": ("b",)}) for width in ("month", None)]  # fmt: skip
    asked += [replace(everybody, by=("account",)), replace(everybody, account="a", by=("currency",))]
    with store.database.writing() as connection:
        connection.execute(sa.delete(ledger_days).where(ledger_days.c.day < closed // DAY_S))
        connection.execute(sa.delete(ledger_hours).where(ledger_hours.c.hour < closed // HOUR_S))
    for query in asked:
        assert told(usage, query) == truth(query) != {}, query


def test_pages_have_every_group_once_in_order(usage):
    whole = UsageQuery(START, int(NOW), None, DAY_S, ("model", "key"), order=(Order("neurons", True),), limit=5000)
    rows = usage.sums(whole).rows
    assert [row.neurons for row in rows] == sorted((row.neurons for row in rows), reverse=True) and len(rows) > 100
    paged: list[Any] = []
    while True:
        page = usage.sums(replace(whole, limit=7, offset=len(paged)))
        assert page.total == len(rows)
        if not page.rows:
            break
        paged += page.rows
    assert paged == list(rows)
    newest = UsageQuery(START, int(NOW), "a", HOUR_S, (), order=(Order("time", True),), limit=1)
    assert usage.sums(newest).rows[0].at == max(e.at // HOUR_S * HOUR_S for e in ENTRIES if e.account == "a")


def test_where_entries_have_gone_hours_are_whole(store, usage):
    """A bound inside an hour that is known only as a whole moves to its end, and the answer says so."""
    usage.entries_kept_s = 10 * DAY_S
    store.ledger.trim(NOW - usage.entries_kept_s)
    old, young = START + DAY_S + 1800, START + 30 * DAY_S + 1800
    page = usage.sums(UsageQuery(old, young, None))
    assert (page.since, page.until) == (old - 1800, young)
    assert page.rows[0].entries == truth(UsageQuery(old - 1800, young, None))[()][0]
    # Sums by the hour and longer are what they were.
    query = UsageQuery(START, int(NOW), None, HOUR_S, ("model",), limit=5000)
    assert told(usage, query) == truth(query)


def test_only_what_is_asked_for_is_summed(usage):
    rows = usage.sums(UsageQuery(START, int(NOW), "a", units=("output_tokens",))).rows
    assert set(rows[0].units) == {"output_tokens"}
    assert usage.sums(UsageQuery(START, int(NOW), "nobody")).rows == ()


def test_single_entries_and_receipts(store, usage):
    found = usage.entries(UsageQuery(START, int(NOW), "b", only={"status": ("left",)}, order=(Order("time", True),)))
    expected = [e for e in ENTRIES if e.account == "b" and e.status == "left" and START <= e.at < int(NOW)]
    assert [e.id for e in found] == [e.id for e in sorted(expected, key=lambda e: (-e.at, e.id))]
    one = ENTRIES[7]
    assert usage.receipt(one.account, one.id) == [one] and usage.receipt(None, one.id) == [one]
    assert usage.receipt("somebody else", one.id) == [] and usage.receipt(None, "unknown") == []
    prompts = [structs.replace(one, id=name) for name in ("x.2", "x", "x.10")]
    store.write([entry.row() for entry in prompts])
    assert [entry.id for entry in usage.receipt(None, "x")] == ["x", "x.2", "x.10"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-01-30", START),
        ("2026-01-30T06:00:00Z", START + 6 * HOUR_S),
        ("2026-01-30T06:00:00.500Z", START + 6 * HOUR_S),
        ("2026-01-30T06:00:00+02:00", START + 4 * HOUR_S),
        ("1769731200", START),
        ("36h", START - 36 * HOUR_S),
        ("7d", START - 7 * DAY_S),
        ("2w", START - 14 * DAY_S),
    ],
)
def test_times_as_people_write_them(text, at):
    assert moment(text, START + 0.5) == at


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "-1", "9" * 14, "7y", "1e9", "٣"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="is no time"):
        moment(text, START)


def test_months():
    assert months(START, START + 31 * DAY_S) == [START - 29 * DAY_S, START + 2 * DAY_S, START + 30 * DAY_S]
