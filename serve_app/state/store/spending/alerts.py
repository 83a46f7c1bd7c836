"""Alerts of budgets, in the store: each share of each budget once in its window, whichever gateway notices it first."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.spending.alerts import Alert
from serve_app.state.spending.quotas import Want
from serve_app.state.store.database import Database
from serve_app.state.store.tables import alerts

if TYPE_CHECKING:
    from serve_app.state.store.deferred.events import EventTable

_KEEP_S = 40 * 86400.0


class AlertTable:
    """``shares``: per cent of a budget at which somebody is told."""

    def __init__(self, database: Database, events: EventTable, shares: tuple[int, ...] = (50, 80, 100)) -> None:
        self._database = database
        self._events = events
        self.shares = shares
        # What the table is known to have, so that it need not be asked.
        self._known: set[tuple[str, str, str, int, int]] = set()
        insert = database.insert(alerts).on_conflict_do_nothing(
            index_elements=["account", "key", "kind", "window", "share"]
        )
        self._insert = insert.returning(alerts.c.id)

    def notice(self, connection: Connection, now: float, found: Iterable[tuple[Want, int]]) -> None:
        """Writes down which shares are reached by what is spent, and whom to tell, within the transaction that read it.
        A budget that refuses a request is used up, whatever little is left of it.
        """
        for want, spent in found:
            if not want.quota.is_budget or not (spent or want.refused):
                continue
            for share in self.shares:
                place = (*want.quota, want.window, share)
                reached = spent * 100 >= share * want.limit or (want.refused and share == 100)
                if not reached or place in self._known:
                    continue
                alert = Alert(*place, spent, want.limit, now)
                columns = {name: getattr(alert, name) for name in Alert.__slots__}
                row = columns | {"id": f"alert_{secrets.token_hex(12)}", "tries": 0, "due": None}
                if connection.execute(self._insert.values(**row)).first() is not None:
                    self._events.put(connection, alert.account, alert.event, now, operator=True)
                if len(self._known) > 10_000:
                    self._known.clear()
                self._known.add(place)

    def all(self) -> list[Alert]:
        """The latest first."""
        with self._database.reading() as connection:
            query = sa.select(alerts).order_by(alerts.c.at.desc(), alerts.c.share.desc())
            return [_alert(row) for row in connection.execute(query)]

    def trim(self, now: float) -> None:
        with self._database.writing() as connection:
            connection.execute(sa.delete(alerts).where(alerts.c.at < now - _KEEP_S))


def _alert(row: sa.Row) -> Alert:
    return Alert(row.account, row.key, row.kind, row.window, row.share, row.spent, row.limit, row.at)
