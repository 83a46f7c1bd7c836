"""The ledger in the store: each entry once, sums that agree with entries, and stay when these have gone."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import sqlalchemy as sa
from alembic import command
from msgspec.structs import replace

from serve_app.state.spending.ledger import Entry
from serve_app.state.store import migrate
from serve_app.state.store.database import Database
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import SUMMED_BY, UNIT_COLUMNS, ledger, ledger_days, ledger_hours

ENTRY = Entry(
    "r0", "team", "0123456789ab", 7200.5, 0.25, "@cf/a/b", "text-generation", "done",
    {"input_tokens": 21, "cached_tokens": 16, "output_tokens": 3}, 1_500_000, 16_500, "USD",
)  # fmt: skip


def entries(count: int) -> list[Entry]:
    """Of two accounts, keys, models, states and hours, and one of another unit."""
    made = [
        replace(
            ENTRY,
            id=f"r{n}",
            account=f"team-{n % 2}",
            key=f"key-{n % 3}",
            model=f"m{n % 2}",
            status="done" if n % 5 else "left",
            at=3600.0 * (n % 30) + n / 7,
            batch="b" if n % 4 == 0 else "",
        )
        for n in range(count)
    ]
    return [*made, replace(ENTRY, id="sound", units={"audio_ms": 1500, "what nobody knows": 2})]


def sums(store: SqlStore, table: sa.Table) -> dict[tuple, Counter]:
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(table)).mappings().all()
    period = next(iter(table.primary_key.columns)).name
    return {
        (row[period], *(row[name] for name in SUMMED_BY)): Counter(
            {name: row[name] for name in ("entries", "neurons", "money", *UNIT_COLUMNS) if row[name]}
        )
        for row in rows
    }


def by_hand(made: list[Entry], length: int) -> dict[tuple, Counter]:
    found: dict[tuple, Counter] = {}
    for one in made:
        place = (int(one.at // length), *(getattr(one, name) for name in SUMMED_BY))
        known = {name: count for name, count in one.units.items() if name in UNIT_COLUMNS}
        found.setdefault(place, Counter()).update({**known, "entries": 1, "neurons": one.neurons, "money": one.money})
    return found


def test_an_entry_comes_back_as_it_was(store):
    store.write([ENTRY.row()])
    assert store.ledger.entry("r0") == ENTRY and store.ledger.entry("r1") is None


def test_sums_are_those_of_the_entries_and_each_counts_once(store):
    made = entries(90)
    rows = [one.row() for one in made]
    store.write(rows[:50])
    # Some again, in another group, changed, and twice in the same one.
    store.write([*rows[30:], *(replace(one, neurons=1).row() for one in made[:40]), *rows[60:]])
    store.write(rows)
    for table, length in ((ledger_hours, 3600), (ledger_days, 86_400)):
        assert sums(store, table) == by_hand(made, length)
    assert all(store.ledger.entry(one.id).neurons == one.neurons for one in made)


def test_gateways_that_write_at_once_count_each_entry_once(store):
    made = [replace(ENTRY, id=f"r{n}", key=f"k{n % 4}", at=3600.0 * (n % 3)) for n in range(120)]

    def write(offset: int) -> None:
        mine = made[offset:] + made[:offset]
        for at in range(0, len(mine), 30):
            store.write([one.row() for one in mine[at : at + 30]])

    threads = [threading.Thread(target=write, args=(offset,)) for offset in (0, 40, 80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums(store, ledger_hours) == by_hand(made, 3600)


def test_a_group_that_fails_counts_nothing(store):
    with pytest.raises(sa.exc.SQLAlchemyError):
        store.write([ENTRY.row(), replace(ENTRY, id="r1", account=None).row()])
    assert store.ledger.entry("r0") is None and not sums(store, ledger_hours)


def test_old_entries_go_and_their_sums_stay(store):
    made = entries(60)
    store.write([one.row() for one in made])
    before = {table: sums(store, table) for table in (ledger_hours, ledger_days)}
    old = [one for one in made if one.at < 36_000]
    assert store.ledger.trim(36_000) == len(old) > 10 and store.ledger.trim(36_000) == 0
    with store.database.reading() as connection:
        kept = set(connection.execute(sa.select(ledger.c.id)).scalars())
    assert kept == {one.id for one in made} - {one.id for one in old}
    assert {table: sums(store, table) for table in before} == before


def test_a_state_directory_of_the_version_before_is_upgraded(open_store, database, tmp_path):
    """Schema 2 with its rows, as the last release left it."""
    older = Database(tmp_path / "home", database, lambda _: None)
    config = migrate._config()
    with older.unprepared() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        connection.execute(sa.text("INSERT INTO accounts (name, weight) VALUES ('team', 2)"))
        connection.execute(
            sa.text("INSERT INTO keys (hash, account, priority, created) VALUES (:h, 'team', 'batch', '2026-01-02')"),
            {"h": "ab" * 32},
        )
        connection.execute(
            sa.text(
                "INSERT INTO answers (account, key, created, print, owner, size) VALUES ('team', 'k', 1, 'p', 'o', 1)"
            )
        )
    older.close()
    store = open_store()
    store.open()
    assert migrate.version(store.database) == migrate.HEAD
    [key] = store.accounts.all()["team"].keys
    assert (key.hash, key.priority) == ("ab" * 32, "batch")
    store.write([ENTRY.row()])
    assert store.ledger.entry("r0") == ENTRY and len(sums(store, ledger_days)) == 1
