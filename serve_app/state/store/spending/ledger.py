"""The ledger in the store: an entry for each piece of work, and sums of them that stay when entries have gone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.spending.ledger import DAY_S, HOUR_S, KIND, Entry
from serve_app.state.store.database import Database
from serve_app.state.store.spending.closing import SUMMED, DayCloser, Sums, adding, regrouped, rows_of
from serve_app.state.store.tables import SUMMED_BY, ledger, ledger_days, ledger_hours

# Entries that one look drops at most, so that no transaction holds others up for long.
_TRIM = 20_000
_PLACE = itemgetter(*SUMMED_BY)


class LedgerTable:
    """Writes entries, each once by its id, and their sums by hour and day in the same transaction."""

    KIND = KIND

    def __init__(self, database: Database) -> None:
        self._database = database
        self._put = database.insert(ledger).on_conflict_do_nothing().returning(ledger.c.id)
        self._add_hours = adding(database, ledger_hours)
        self._add_days = adding(database, ledger_days)
        self._closer = DayCloser(database)

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Rows with the columns of the table. One whose id is there already changes nothing."""
        rows = list({row["id"]: row for row in reversed(rows)}.values())
        fresh = set(connection.execute(self._put, rows).scalars())
        hours: Sums = {}
        for row in rows:
            if row["id"] in fresh:
                place = (int(row["at"] // HOUR_S), *_PLACE(row))
                _count(hours.setdefault(place, dict.fromkeys(SUMMED, 0)), row)
        if hours:
            days = regrouped(hours, lambda place: (place[0] * HOUR_S // DAY_S, *place[1:]))
            connection.execute(self._add_hours, rows_of(ledger_hours, hours))
            connection.execute(self._add_days, rows_of(ledger_days, days))
            self._closer.count(connection, hours, days)

    def close_days(self, now: float) -> bool:
        """Has days that are over summed for good, see :mod:`.closing`: one with entries at a time;
        whether there may be another.
        """
        return self._closer.close(now)

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


def _count(sums: dict[str, Any], row: dict[str, Any]) -> None:
    """Adds one entry. A unit that this program does not know stands in the entry alone."""
    for name, count in msgspec.json.decode(row["units"]).items():
        if name in sums:
            sums[name] += count
    sums["entries"] += 1
    for name in ("seconds", "neurons", "money"):
        sums[name] += row[name]
