"""Usage, read from the ledger's sums: whole days from one table, whole hours at their edges from another, and what is
left of hours from the entries themselves.

::

    since          midnight                     midnight          until
      |--|-----------|----------------------------|----------------|--|
    entries  hours               days                     hours     entries

Of closed days there are coarser sums: by month for whole months, for questions about everybody by day and hour, and for
those about accounts by day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from serve_app.state.spending.ledger import DAY_S, HOUR_S, Entry
from serve_app.state.spending.usage import UsagePage, UsageQuery, UsageRow, month_after, month_of, months, widened
from serve_app.state.store.database import Database
from serve_app.state.store.spending.closing import closed_until
from serve_app.state.store.tables import (
    ACCOUNTED_BY,
    TOTALLED_BY,
    UNIT_COLUMNS,
    ledger,
    ledger_account_totals,
    ledger_day_totals,
    ledger_days,
    ledger_hour_totals,
    ledger_hours,
    ledger_months,
)

# PostgreSQL's own memory for sorting is 4 MiB, and years by key go through files with it; and it would compile some
# questions for longer than they take.
_ROOM = sa.text("SELECT set_config('work_mem', '32MB', true), set_config('jit', 'off', true)")
# Prompts that one request may have.
MAX_PARTS = 128
_PLAIN = ("entries", "seconds", "neurons", "money")


class UsageTable:
    """``entries_kept_s``: for how long entries stay; their sums stay always."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self.entries_kept_s = float("inf")

    def sums(self, query: UsageQuery) -> UsagePage:
        """The groups that have something, a page of them."""
        since, until = widened(query, self._clock() - self.entries_kept_s)
        with self._database.reading() as connection:
            # Read first: days that are closed meanwhile stay where they were, too.
            closed = closed_until(connection) * DAY_S
            spans = list(_spans(query, since, until, self._clock(), closed))
            parts = [self._part(query, table, *span) for table, *span in spans]
            if not parts:
                return UsagePage((), 0, since, until)
            if not self._database.is_sqlite:
                connection.execute(_ROOM)
            kept = len(parts) == 1 and _is_grouped(query, spans[0][0])
            asked = _kept(query, parts[0], spans[0][0]) if kept else _paged(query, parts)
            found = connection.execute(asked).all()
        return UsagePage(
            tuple(_rows(query, found)), int(found[0].total) if found else self._beyond(query, parts), since, until
        )

    def entries(self, query: UsageQuery) -> list[Entry]:
        """Single entries, as far as they are kept: from the oldest, or with a descending order from the newest."""
        time_order = ledger.c.at.desc() if query.order[:1] and query.order[0].descending else ledger.c.at.asc()
        asked = sa.select(ledger).where(ledger.c.at >= query.since, ledger.c.at < query.until)
        asked = _chosen(query, ledger, asked).order_by(time_order, ledger.c.id).limit(query.limit).offset(query.offset)
        with self._database.reading() as connection:
            return [Entry.of(dict(row)) for row in connection.execute(asked).mappings()]

    def receipt(self, account: str | None, request_id: str) -> list[Entry]:
        """What was entered for one request of ``account`` (None: of anybody), in the order of its prompts."""
        names = [request_id, *(f"{request_id}.{number}" for number in range(1, MAX_PARTS))]
        asked = sa.select(ledger).where(ledger.c.id.in_(names))
        if account is not None:
            asked = asked.where(ledger.c.account == account)
        with self._database.reading() as connection:
            found = [Entry.of(dict(row)) for row in connection.execute(asked).mappings()]
        return sorted(found, key=lambda entry: names.index(entry.id))

    def _beyond(self, query: UsageQuery, parts: list[sa.Select[Any]]) -> int:
        """How many groups there are, where the page lies behind them."""
        if not query.offset:
            return 0
        grouped = _grouped(query, parts).subquery()
        with self._database.reading() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(grouped)).scalar_one())

    def _part(self, query: UsageQuery, table: sa.Table, since: int, until: int) -> sa.Select[Any]:
        """The sums of one table over a span of time that it has whole."""
        period = ledger.c.at if table is ledger else table.primary_key.columns[0]
        length = _LENGTHS[table]
        columns: list[Any] = [table.c[name] for name in query.by]
        if query.width is not None:
            columns.insert(0, _bucket(query, period, length).label("bucket"))
        values = list(self._values(query, table))
        span = period >= since // length, period < until // length
        if _is_grouped(query, table):
            columns += (v.label(name) for name, v in values)
            return _chosen(query, table, sa.select(*columns).where(*span))
        summed = [sa.func.sum(value).label(name) for name, value in values]
        asked = _chosen(query, table, sa.select(*columns, *summed).where(*span))
        # By place: PostgreSQL does not see that two bound expressions are one.
        return asked.group_by(*(sa.literal_column(str(place)) for place in range(1, len(columns) + 1)))

    def _values(self, query: UsageQuery, table: sa.Table) -> Iterator[tuple[str, Any]]:
        if table is not ledger:
            yield from ((name, table.c[name]) for name in (*_PLAIN, *_units(query)))
            return
        yield "entries", sa.literal_column("1")
        yield from ((name, ledger.c[name]) for name in _PLAIN[1:])
        # SQLite reads JSON from any text; a cast would make a number of it.
        counts = (
            sa.type_coerce(ledger.c.units, sa.JSON) if self._database.is_sqlite else sa.cast(ledger.c.units, sa.JSON)
        )
        for name in _units(query):
            yield name, sa.func.coalesce(counts[name].as_integer(), 0)


def _is_grouped(query: UsageQuery, table: sa.Table) -> bool:
    """Whether each row of the table is a group of its own."""
    period, *kept = (column.name for column in table.primary_key.columns)
    return period != "id" and query.width == _LENGTHS[table] and {*kept} <= {*query.by}


def _chosen(query: UsageQuery, table: sa.Table, asked: sa.Select[Any]) -> sa.Select[Any]:
    """``asked`` of the rows that the query is about."""
    if query.account is not None:
        asked = asked.where(table.c.account == query.account)
    for name, values in query.only.items():
        asked = asked.where(table.c[name].in_(values))
    for name, values in query.but.items():
        asked = asked.where(table.c[name].not_in(values))
    return asked


# Seconds of what the first column of each table counts.
_LENGTHS = {ledger_hours: HOUR_S, ledger_days: DAY_S, ledger_hour_totals: HOUR_S, ledger_day_totals: DAY_S}
_LENGTHS |= {ledger_account_totals: DAY_S, ledger_months: DAY_S, ledger: 1}


@dataclass(slots=True, frozen=True)
class _Level:
    """``table`` has the sums of all its periods that end by ``until`` (unix seconds; None: of all)."""

    table: sa.Table
    until: int | None = None

    def whole(self, since: int, until: int) -> tuple[int, int]:
        """The part of a span that this table has."""
        until = until if self.until is None else min(until, self.until)
        if since >= until:
            return since, since
        if self.table is ledger_months:
            # That of the second before it begins.
            return month_after(since - 1), month_of(until)
        length = _LENGTHS[self.table]
        return since + -since % length, until - until % length


def _spans(query: UsageQuery, since: int, until: int, now: float, closed: int) -> Iterator[tuple[sa.Table, int, int]]:
    """Which table has which part of the time, each in the largest units that the query allows. Days that end by
    ``closed`` (unix seconds) are closed.
    """
    width = query.width
    if isinstance(width, int) and width % HOUR_S:
        if since < until:
            yield ledger, since, until
        return
    if until > now:
        # Nothing ends in the future: this hour's sum is whole.
        until += -until % DAY_S
    dimensions = {*query.by, *query.only, *query.but}
    totalled = query.account is None and dimensions <= {*TOTALLED_BY}
    levels = [_Level(ledger_hours), _Level(ledger)]
    if totalled:
        levels.insert(0, _Level(ledger_hour_totals, closed))
    if width is None or width == "month" or width % DAY_S == 0:
        levels.insert(0, _Level(ledger_days))
        if totalled:
            levels.insert(0, _Level(ledger_day_totals, closed))
        elif dimensions <= {*ACCOUNTED_BY}:
            levels.insert(0, _Level(ledger_account_totals, closed))
        if not totalled and not isinstance(width, int):
            levels.insert(0, _Level(ledger_months, closed))
    yield from _cut(levels, since, until)


def _cut(levels: Sequence[_Level], since: int, until: int) -> Iterator[tuple[sa.Table, int, int]]:
    if since >= until:
        return
    level, *finer = levels
    first, last = level.whole(since, until)
    if first >= last:
        yield from _cut(finer, since, until)
        return
    yield from _cut(finer, since, first)
    yield level.table, first, last
    yield from _cut(finer, last, until)


def _bucket(query: UsageQuery, period: Any, length: int) -> Any:
    """When the bucket of a row begins, in unix seconds."""
    if query.width == "month":
        starts = months(query.since - query.since % DAY_S, query.until + DAY_S)
        cases = [(period < then // length, sa.literal(start)) for start, then in zip(starts, starts[1:], strict=False)]
        return sa.case(*cases, else_=sa.literal(starts[-1])) if cases else sa.literal(starts[-1])
    assert isinstance(query.width, int)
    seconds = sa.cast(sa.func.floor(period), sa.BigInteger) if length == 1 else period
    # Without an operation that changes nothing PostgreSQL can go by the table's order.
    number = seconds if query.width == length else seconds // _number(query.width // length)
    return number * _number(query.width)


def _number(value: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(value), sa.BigInteger)


def _names(query: UsageQuery) -> list[str]:
    return [*(["bucket"] if query.width is not None else []), *query.by]


def _units(query: UsageQuery) -> tuple[str, ...]:
    return UNIT_COLUMNS if query.units is None else query.units


def _grouped(query: UsageQuery, parts: list[sa.Select[Any]]) -> sa.Select[Any]:
    """All groups. Without anything to group by there is one, and none where nothing has been used."""
    names = _names(query)
    if len(parts) == 1:
        inner = parts[0].subquery()
        return sa.select(*(inner.c[name] for name in (*names, *_PLAIN, *_units(query)))).where(inner.c.entries > 0)
    inner = sa.union_all(*parts).subquery()
    sums = [sa.func.sum(inner.c[name]).label(name) for name in (*_PLAIN, *_units(query))]
    asked = sa.select(*(inner.c[name] for name in names), *sums).group_by(*(inner.c[name] for name in names))
    return asked.having(sa.func.sum(inner.c.entries) > 0)


def _paged(query: UsageQuery, parts: list[sa.Select[Any]]) -> sa.Select[Any]:
    grouped = _grouped(query, parts).subquery()
    asked = sa.select(*grouped.c, sa.func.count().over().label("total")).order_by(*_order(query, grouped, "bucket"))
    return asked.limit(query.limit).offset(query.offset)


def _kept(query: UsageQuery, part: sa.Select[Any], table: sa.Table) -> sa.Select[Any]:
    """:func:`_paged` of rows that are groups already: in their table's order no others than the page's are read, and
    the others counted.
    """
    rows = part.add_columns(table.primary_key.columns[0].label("period")).subquery()
    total = sa.select(sa.func.count()).select_from(rows).where(rows.c.entries > 0).scalar_subquery()
    names = (*_names(query), *_PLAIN, *_units(query))
    asked = sa.select(*(rows.c[name] for name in names), total.label("total")).where(rows.c.entries > 0)
    return asked.order_by(*_order(query, rows, "period")).limit(query.limit).offset(query.offset)


def _order(query: UsageQuery, rows: sa.FromClause, time: str) -> Iterator[sa.ColumnElement[Any]]:
    """``time``: the column that buckets are in the order of."""
    for wanted in query.order:
        name = time if wanted.by == "time" else wanted.by
        if name in rows.c:
            yield rows.c[name].desc() if wanted.descending else rows.c[name].asc()
    # Pages need one order of all groups.
    yield from (rows.c[time if name == "bucket" else name] for name in _names(query))


def _rows(query: UsageQuery, found: Sequence[sa.Row]) -> Iterator[UsageRow]:
    """From the columns of :func:`_paged`, by their places: a page may have ten thousand rows."""
    units, bucketed = _units(query), query.width is not None
    first = bucketed + len(query.by)
    last = first + len(_PLAIN) + len(units)
    for row in found:
        entries, seconds, neurons, money, *counts = row[first:last]
        yield UsageRow(
            at=int(row[0]) if bucketed else None,
            dimensions=dict(zip(query.by, row[bucketed:first], strict=True)),
            entries=int(entries),
            seconds=float(seconds),
            units={name: int(count) for name, count in zip(units, counts, strict=True) if count},
            neurons=int(neurons),
            money=int(money),
        )
