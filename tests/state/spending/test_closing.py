"""Days that are closed: their coarser sums have each entry once, whenever it comes and whoever closes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest
import sqlalchemy as sa
from alembic import command
from msgspec.structs import replace
from sqlalchemy import event

from serve_app.state.spending.ledger import DAY_S, HOUR_S, Entry
from serve_app.state.spending.usage import month_after, month_of
from serve_app.state.store import migrate
from serve_app.state.store.database import Database
from serve_app.state.store.spending.closing import CLOSE_AFTER_S, SUMMED
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import (
    ACCOUNTED_BY,
    SUMMED_BY,
    TOTALLED_BY,
    UNIT_COLUMNS,
    ledger_account_totals,
    ledger_closed,
    ledger_day_totals,
    ledger_days,
    ledger_hour_totals,
    ledger_months,
)
from tests.state.gateways import Gateways
from tests.state.spending.days import begin, close_days, mark
from tests.waiting import until

# 2026-01-30T00:00:00Z, and the day that is two days and a month later.
START = 1_769_731_200
MARCH = START + 30 * DAY_S
ENTRY = Entry(
    "r", "team", "0123456789ab", START + 0.5, 0.25, "m", "text-generation", "done",
    {"input_tokens": 21, "cached_tokens": 16, "output_tokens": 3}, 1_500_000, 16_500, "USD",
)  # fmt: skip


def made(count: int, days: int, prefix: str = "r", start: int = START) -> list[Entry]:
    return [
        replace(
            ENTRY,
            id=f"{prefix}{n}",
            account=f"team-{n % 2}",
            key=f"key-{n % 3}",
            model=f"m{n % 2}",
            batch="b" if n % 4 == 0 else "",
            neurons=n,
            at=start + n * days * DAY_S / count,
        )
        for n in range(count)
    ]


def sums(store: SqlStore, table: sa.Table) -> dict[tuple, Counter]:
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(table)).mappings().all()
    places = [column.name for column in table.primary_key.columns]
    names = ("entries", "seconds", "neurons", "money", *UNIT_COLUMNS)
    return {tuple(row[p] for p in places): Counter({n: row[n] for n in names if row[n]}) for row in rows}


def by_hand(entries: list[Entry], place: Callable[[Entry], int], by: tuple[str, ...]) -> dict[tuple, Counter]:
    found: dict[tuple, Counter] = {}
    for one in entries:
        counts = {**one.units, "entries": 1, "seconds": one.seconds, "neurons": one.neurons, "money": one.money}
        found.setdefault((place(one), *(getattr(one, n) for n in by)), Counter()).update(counts)
    return {place: +counts for place, counts in found.items()}


def check(store: SqlStore, entries: list[Entry]) -> None:
    """All coarser sums are those of the entries of closed days and months, and there are no others."""
    closed = mark(store)
    days = [one for one in entries if one.at < closed]
    assert sums(store, ledger_hour_totals) == by_hand(days, lambda one: int(one.at // HOUR_S), TOTALLED_BY)
    assert sums(store, ledger_day_totals) == by_hand(days, lambda one: int(one.at // DAY_S), TOTALLED_BY)
    assert sums(store, ledger_account_totals) == by_hand(days, lambda one: int(one.at // DAY_S), ACCOUNTED_BY)
    months = [one for one in days if month_after(int(one.at)) <= closed]
    assert sums(store, ledger_months) == by_hand(months, lambda one: month_of(int(one.at)) // DAY_S, SUMMED_BY)


def test_entries_before_at_and_after_closing(store):
    entries = made(120, 40)
    begin(store, START - 3 * DAY_S)
    store.write([one.row() for one in entries[::2]])
    check(store, entries[::2])
    # A moment before the first day may be closed, and that moment.
    over = START + DAY_S + CLOSE_AFTER_S
    close_days(store, over - 1)
    assert mark(store) <= START
    close_days(store, over)
    assert mark(store) == START + DAY_S
    check(store, entries[::2])
    close_days(store, MARCH + 3 * DAY_S + CLOSE_AFTER_S)
    assert mark(store) == MARCH + 3 * DAY_S
    check(store, entries[::2])
    # The others are late for closed months, for closed days of an open month, and in time for the rest; and all again.
    rows = [one.row() for one in entries]
    for _ in range(2):
        store.write(rows[:70])
        store.write(rows[50:])
        check(store, entries)
    close_days(store, START + 100 * DAY_S)
    check(store, entries)
    assert len(sums(store, ledger_months)) and mark(store) == START + 99 * DAY_S


def test_days_that_are_closed_already_are_summed_by_account_when_a_store_is_upgraded(database, tmp_path):
    entries = made(60, 20)
    counts = by_hand(entries, lambda one: int(one.at // DAY_S), SUMMED_BY)
    zero = dict.fromkeys(SUMMED, 0)
    rows = [zero | dict(zip(("day", *SUMMED_BY), place, strict=True)) | dict(some) for place, some in counts.items()]
    closed = START // DAY_S + 10
    with closing(Database(tmp_path / "old", database, lambda _: None)) as old, old.unprepared() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0009")
        connection.execute(sa.insert(ledger_days), rows)
        connection.execute(sa.update(ledger_closed).values(until=closed))
    with SqlStore(tmp_path / "new", database) as store:
        store.open()
        done = [one for one in entries if one.at < closed * DAY_S]
        assert sums(store, ledger_account_totals) == by_hand(done, lambda one: int(one.at // DAY_S), ACCOUNTED_BY)


def test_a_day_without_entries_is_closed_too(store):
    begin(store, START - 300 * DAY_S)
    close_days(store, START + 40 * DAY_S)
    assert mark(store) == START + 39 * DAY_S
    store.write([ENTRY.row()])
    check(store, [ENTRY])
    assert len(sums(store, ledger_months)) == 1


def test_a_late_group_that_fails_changes_nothing(store):
    begin(store, START - 300 * DAY_S)
    close_days(store, START + 40 * DAY_S)
    with pytest.raises(sa.exc.SQLAlchemyError):
        store.write([ENTRY.row(), replace(ENTRY, id="bad", account=None).row()])
    check(store, [])


def test_an_entry_on_its_way_is_not_missed(store, open_store):
    """A gateway hangs in the middle of writing an entry of the day that another would close."""
    one, two = made(2, 1)
    begin(store, START)
    store.write([one.row()])
    other, now = open_store("other"), START + DAY_S + CLOSE_AFTER_S
    other.open()
    with store.database.writing() as connection:
        store.ledger.write(connection, [two.row().columns])
        closing = threading.Thread(target=other.ledger.close_days, args=(now,))
        closing.start()
        if not store.database.is_sqlite:
            # In SQLite it waits for the other writer.
            closing.join(60)
            assert not closing.is_alive() and mark(store) == START
    closing.join(60)
    close_days(other, now)
    assert mark(store) == START + DAY_S
    check(store, [one, two])


def test_an_entry_that_comes_while_its_day_is_closed_counts_once(store, open_store):
    """The one who closes has summed, and not yet moved the mark, when it comes."""
    one, two = made(2, 1)
    begin(store, START)
    store.write([one.row()])
    summed, go_on = threading.Event(), threading.Event()

    def hold(_: object, __: object, statement: str, *___: object) -> None:
        if statement.startswith("UPDATE ledger_closed"):
            summed.set()
            assert go_on.wait(60)

    event.listen(store.database.engine, "before_cursor_execute", hold)
    closing = threading.Thread(target=store.ledger.close_days, args=(START + DAY_S + CLOSE_AFTER_S,))
    closing.start()
    other = open_store("other")
    assert summed.wait(60)
    writing = threading.Thread(target=other.write, args=([two.row()],))
    writing.start()
    # Entries of other days go their way meanwhile, where several can write at all.
    today = replace(ENTRY, id="today", at=START + 5.0 * DAY_S)
    if not store.database.is_sqlite:
        open_store("third").write([today.row()])
        assert writing.is_alive() and store.ledger.entry(two.id) is None
        # And nobody closes the day a second time.
        assert other.ledger.close_days(START + DAY_S + CLOSE_AFTER_S) is False
    go_on.set()
    closing.join(60)
    writing.join(60)
    other.write([today.row()])
    assert mark(store) == START + DAY_S
    check(store, [one, two, today])


def test_gateways_that_close_and_write_at_once(store, open_store):
    early, late = made(60, 34), made(60, 34, "late")
    begin(store, START)
    store.write([one.row() for one in early])
    others = [open_store(name) for name in ("one", "two", "three")]
    now, failures = START + 35 * DAY_S, []

    def run(work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def close(gateway: SqlStore) -> None:
        deadline = time.monotonic() + 60
        while mark(gateway) < START + 34 * DAY_S:
            gateway.ledger.close_days(now)
            assert time.monotonic() < deadline

    def write() -> None:
        for at in range(0, len(late), 10):
            others[2].write([one.row() for one in late[at : at + 20]])

    threads = [run(lambda gateway=gateway: close(gateway)) for gateway in others[:2]] + [run(write)]
    for thread in threads:
        thread.join(90)
    assert not failures
    assert mark(store) == START + 34 * DAY_S
    check(store, early + late)


async def test_a_gateway_closes_days_by_itself(store, database, tmp_path):
    day = int(time.time() // DAY_S - 3) * DAY_S
    entries = made(9, 1, start=day)
    begin(store, day)
    store.write([one.row() for one in entries])
    with Gateways(database, tmp_path) as gateways:
        await gateways.make("one").start()
        await until(lambda: mark(store) > day)
    check(store, entries)
    with store.database.reading() as connection:
        assert connection.execute(sa.select(sa.func.sum(ledger_days.c.entries))).scalar() == 9
