"""Days that are closed: summed once more, so that questions about years read few rows.

Entries change the sums of their hour and day. Coarser sums would be rows that every gateway changes with every group of
entries, so they are made when a day has been over for some hours::

    ledger_hours --+--> ledger_hour_totals    of everybody
    ledger_days  --+--> ledger_day_totals     of everybody
                   +--> ledger_account_totals of each account
                   +--> ledger_months         when the month's last day is closed

One transaction makes the sums and moves the mark behind the day. An entry that comes for a closed day changes the
coarser sums together with the others. Each entry is in them once, by a lock for each day: whoever writes entries shares
it and then reads the mark; whoever closes has it alone. Closing does not wait for a lock, so a writer that hangs holds
up nobody but it, and writers wait only if their entry is for a day that is being closed at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.spending.ledger import DAY_S, HOUR_S
from serve_app.state.spending.usage import month_after, month_of
from serve_app.state.store.database import Database, insert_into
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
    ledger_hours,
    ledger_months,
)

# What is summed.
SUMMED = ("entries", "seconds", *UNIT_COLUMNS, "neurons", "money")
# Sums by their place: the period and what they are kept by.
Sums = dict[tuple[Any, ...], dict[str, Any]]
# How long a day has been over when it is closed: nearly all of its entries have arrived.
CLOSE_AFTER_S = 6 * HOUR_S
# Days without entries that are closed at once, at most.
_STEP = 200
_DAY_HOURS = DAY_S // HOUR_S
# The first of two numbers of PostgreSQL's locks; the second is the day.
_LOCK = 0x1ED6E


def closed_until(connection: Connection) -> int:
    """The first day that is not closed, counted from 1970-01-01."""
    return int(connection.execute(sa.select(ledger_closed.c.until)).scalar_one())


class DayCloser:
    """Has the sums of closed days made, and kept right."""

    def __init__(self, database: Database) -> None:
        self._database = database
        made = (ledger_hour_totals, ledger_day_totals, ledger_account_totals, ledger_months)
        self._add = {table: adding(database, table) for table in made}

    def close(self, now: float) -> bool:
        """Closes the next day with entries that has been over for long enough, and those without before it; whether
        there may be another. Where another gateway is closing, or an entry of the day is on its way, nothing happens.
        """
        limit = int((now - CLOSE_AFTER_S) // DAY_S)
        with self._database.writing() as connection:
            # One at a time; who finds another at it has nothing to do.
            since = connection.execute(sa.select(ledger_closed.c.until).with_for_update(skip_locked=True)).scalar()
            if since is None or since >= limit:
                return False
            begin = month_of(since * DAY_S) // DAY_S
            days = sa.select(sa.func.min(ledger_days.c.day)).where(ledger_days.c.day >= since)
            used = connection.execute(days).scalar()
            until = min(limit, since + _STEP, limit if used is None else used + 1)
            if not self._alone(connection, begin, until):
                return False
            # What had been on its way is there now, and may be of a day between.
            used = connection.execute(days).scalar()
            until = min(until, limit if used is None else used + 1)
            span = since * _DAY_HOURS, until * _DAY_HOURS
            self._sum(connection, ledger_hours, ledger_hour_totals, TOTALLED_BY, span)
            self._sum(connection, ledger_days, ledger_day_totals, TOTALLED_BY, (since, until))
            self._sum(connection, ledger_days, ledger_account_totals, ACCOUNTED_BY, (since, until))
            # Others that have ended have no entries.
            for month in sorted({begin, month_of((until - 1) * DAY_S) // DAY_S}):
                if (end := month_after(month * DAY_S) // DAY_S) <= until:
                    place: sa.ColumnElement[int] = sa.literal_column(str(month))
                    self._sum(connection, ledger_days, ledger_months, SUMMED_BY, (month, end), place)
            connection.execute(sa.update(ledger_closed).values(until=until))
        return until < limit

    def count(self, connection: Connection, hours: Sums, days: Sums) -> None:
        """Adds new entries, as they were added to the sums by hour and day in this transaction, to those of closed
        days.
        """
        self._share(connection, {place[0] for place in days})
        until = closed_until(connection)
        hours = {place: sums for place, sums in hours.items() if place[0] // _DAY_HOURS < until}
        if not hours:
            return
        days = {place: sums for place, sums in days.items() if place[0] < until}
        self._write(connection, ledger_hour_totals, regrouped(hours, _by(TOTALLED_BY)))
        self._write(connection, ledger_day_totals, regrouped(days, _by(TOTALLED_BY)))
        self._write(connection, ledger_account_totals, regrouped(days, _by(ACCOUNTED_BY)))
        months = {p: sums for p, sums in days.items() if month_after(p[0] * DAY_S) <= until * DAY_S}
        self._write(connection, ledger_months, regrouped(months, _month))

    def _write(self, connection: Connection, table: sa.Table, sums: Sums) -> None:
        if sums:
            connection.execute(self._add[table], rows_of(table, sums))

    def _sum(
        self,
        connection: Connection,
        fine: sa.Table,
        coarse: sa.Table,
        by: tuple[str, ...],
        span: tuple[int, int],
        place: Any = None,
    ) -> None:
        """Sums the rows of a span of periods by period, or all for one ``place``."""
        period = fine.primary_key.columns[0]
        kept = [period if place is None else place.label("place"), *(fine.c[name] for name in by)]
        summed = [sa.cast(sa.func.sum(fine.c[name]), coarse.c[name].type).label(name) for name in SUMMED]
        groups = [fine.c[name] for name in by] if place is not None else kept
        rows = sa.select(*kept, *summed).where(period >= span[0], period < span[1]).group_by(*groups)
        into = [coarse.primary_key.columns[0].name, *by, *SUMMED]
        connection.execute(sa.insert(coarse).from_select(into, rows))

    def _share(self, connection: Connection, days: Collection[int]) -> None:
        """Nobody closes these days until this transaction ends; in SQLite whoever writes is alone."""
        if not self._database.is_sqlite:
            query = sa.text("SELECT pg_advisory_xact_lock_shared(:lock, day) FROM unnest(CAST(:days AS int[])) AS day")
            connection.execute(query, {"lock": _LOCK, "days": sorted(days)})

    def _alone(self, connection: Connection, since: int, until: int) -> bool:
        """Whether nobody is writing entries of these days, and nobody does until this transaction ends."""
        if self._database.is_sqlite:
            return True
        query = sa.text(
            "SELECT bool_and(pg_try_advisory_xact_lock(:lock, day)) "
            "FROM generate_series(CAST(:since AS int), CAST(:last AS int)) AS day"
        )
        return bool(connection.execute(query, {"lock": _LOCK, "since": since, "last": until - 1}).scalar())


def adding(database: Database, table: sa.Table) -> Any:
    """Adds sums to those that are there."""
    return _adding(database.is_sqlite, table)


@cache
def _adding(is_sqlite: bool, table: sa.Table) -> Any:
    """Of one kind of database; so many columns take SQLAlchemy longer than all else that a store begins with."""
    new = insert_into(is_sqlite, table)
    return new.on_conflict_do_update(
        index_elements=list(table.primary_key.columns),
        set_={name: table.c[name] + new.excluded[name] for name in SUMMED},
    )


def rows_of(table: sa.Table, sums: Sums) -> list[dict[str, Any]]:
    """In one order, so that gateways that write them at the same time wait for each other and not in a circle."""
    names = [column.name for column in table.primary_key.columns]
    return [dict(zip(names, place, strict=True)) | sums[place] for place in sorted(sums)]


def regrouped(sums: Sums, place_of: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Sums:
    """The same by coarser places."""
    found: Sums = {}
    for place, counts in sums.items():
        total = found.setdefault(place_of(place), dict.fromkeys(SUMMED, 0))
        for name, count in counts.items():
            total[name] += count
    return found


def _by(names: Sequence[str]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    return itemgetter(0, *(1 + SUMMED_BY.index(name) for name in names))


def _month(place: tuple[Any, ...]) -> tuple[Any, ...]:
    return month_of(place[0] * DAY_S) // DAY_S, *place[1:]
