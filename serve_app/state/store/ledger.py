"""The ledger in the store: an entry for each piece of work, and sums of them that stay when entries have gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.ledger import DAY_S, HOUR_S, KIND, Entry
from serve_app.state.store.database import Database
from serve_app.state.store.tables import SUMMED_BY, UNIT_COLUMNS, ledger, ledger_days, ledger_hours

# Entries that one look drops at most, so that no transaction holds others up for long.
_TRIM = 20_000
_SUMMED = ("entries", "seconds", *UNIT_COLUMNS, "neurons", "money")


class LedgerTable:
    """Writes entries, each once by its id, and their sums by hour and day in the same transaction."""

    KIND = KIND

    def __init__(self, database: Database) -> None:
        self._database = database
        self._put = database.insert(ledger).on_conflict_do_nothing().returning(ledger.c.id)
        self._sums = [(table, length, _adding(database, table)) for table, length in _PERIODS]

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Rows with the columns of the table. One whose id is there already changes nothing."""
        rows = list({row["id"]: row for row in reversed(rows)}.values())
        fresh = set(connection.execute(self._put, rows).scalars())
        new = [row for row in rows if row["id"] in fresh]
        if not new:
            return
        counted = [(row, _counts(row)) for row in new]
        for table, length, add in self._sums:
            sums: dict[tuple[Any, ...], Counter[str]] = {}
            for row, counts in counted:
                place = (int(row["at"] // length), *(row[name] for name in SUMMED_BY))
                sums.setdefault(place, Counter()).update(counts)
            names = (table.primary_key.columns.keys()[0], *SUMMED_BY)
            # In one order, so that gateways that do so at the same time wait for each other and not in a circle.
            connection.execute(
                add,
                [
                    dict(zip(names, place, strict=True)) | {name: found[name] for name in _SUMMED}
                    for place, found in sorted(sums.items())
                ],
            )

    def entry(self, entry_id: str) -> Entry | None:
        with self._database.reading() as connection:
            found = connection.execute(sa.select(ledger).where(ledger.c.id == entry_id)).mappings().one_or_none()
        return None if found is None else Entry.of(dict(found))

    def trim(self, before: float) -> int:
        """Drops entries that ended before ``before`` (unix seconds), the oldest first, and keeps their sums; how many
        went, at most some thousands at a time.
        """
        oldest = sa.select(ledger.c.id).where(ledger.c.at < before).order_by(ledger.c.at).limit(_TRIM)
        with self._database.writing() as connection:
            return connection.execute(sa.delete(ledger).where(ledger.c.id.in_(oldest))).rowcount


_PERIODS = ((ledger_hours, HOUR_S), (ledger_days, DAY_S))


def _adding(database: Database, table: sa.Table) -> Any:
    new = database.insert(table)
    return new.on_conflict_do_update(
        index_elements=list(table.primary_key.columns),
        set_={name: table.c[name] + new.excluded[name] for name in _SUMMED},
    )


def _counts(row: dict[str, Any]) -> dict[str, Any]:
    units = {name: count for name, count in msgspec.json.decode(row["units"]).items() if name in UNIT_COLUMNS}
    return {**units, "entries": 1, "seconds": row["seconds"], "neurons": row["neurons"], "money": row["money"]}
