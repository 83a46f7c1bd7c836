"""Alerts of budgets, in the store: each share of each budget once in its window, whichever gateway notices it first.

A row is an alert that was noticed. Gateways take those whose time has come, one at a time, and mark them when their
receiver has them; a gateway that dies over one leaves it to the next.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.alerts import Alert
from serve_app.state.quotas import Want
from serve_app.state.store.database import Database
from serve_app.state.store.tables import alerts

# How long a gateway has for one attempt before another may try.
CLAIM_S = 60.0
# The wait before attempt n; after the last one nobody tries any more.
BACKOFF_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 18000.0, 36000.0)
_KEEP_S = 40 * 86400.0


class AlertTable:
    """``shares``: per cent of a budget at which somebody is told."""

    def __init__(self, database: Database, shares: tuple[int, ...] = (50, 80, 100)) -> None:
        self._database = database
        self.shares = shares
        # What the table is known to have, so that it need not be asked.
        self._known: set[tuple[str, str, str, int, int]] = set()
        self._insert = database.insert(alerts).on_conflict_do_nothing(
            index_elements=["account", "key", "kind", "window", "share"]
        )

    def notice(self, connection: Connection, now: float, found: Iterable[tuple[Want, int]]) -> None:
        """Writes down which shares are reached by what is spent, within the transaction that read it. A budget that
        refuses a request is used up, whatever little is left of it.
        """
        for want, spent in found:
            if not want.quota.is_budget or not (spent or want.refused):
                continue
            for share in self.shares:
                place = (*want.quota, want.window, share)
                reached = spent * 100 >= share * want.limit or (want.refused and share == 100)
                if not reached or place in self._known:
                    continue
                names = ("account", "key", "kind", "window", "share")
                row = dict(zip(names, place, strict=True))
                row |= {"id": f"msg_{secrets.token_hex(12)}", "at": now, "spent": spent, "limit": want.limit}
                connection.execute(self._insert.values(**row, tries=0, due=now))
                if len(self._known) > 10_000:
                    self._known.clear()
                self._known.add(place)

    def take(self, now: float) -> Alert | None:
        """An alert whose time has come, for ``CLAIM_S`` of this gateway alone."""
        with self._database.writing() as connection:
            query = sa.select(alerts).where(alerts.c.due <= now).order_by(alerts.c.due).limit(1)
            if not self._database.is_sqlite:
                query = query.with_for_update(skip_locked=True)
            row = connection.execute(query).first()
            if row is None:
                return None
            connection.execute(
                sa.update(alerts).where(alerts.c.id == row.id).values(due=now + CLAIM_S, tries=row.tries + 1)
            )
        return _alert(row)

    def done(self, alert_id: str) -> None:
        """Its receiver has it, or there is none."""
        with self._database.writing() as connection:
            connection.execute(sa.update(alerts).where(alerts.c.id == alert_id).values(due=None))

    def later(self, alert: Alert, now: float) -> bool:
        """Its receiver did not take it: it is tried again, or given up (False)."""
        again = alert.tries < len(BACKOFF_S)
        due = now + BACKOFF_S[alert.tries] if again else None
        with self._database.writing() as connection:
            connection.execute(sa.update(alerts).where(alerts.c.id == alert.id).values(due=due))
        return again

    def all(self) -> list[Alert]:
        """The latest first."""
        with self._database.reading() as connection:
            query = sa.select(alerts).order_by(alerts.c.at.desc(), alerts.c.share.desc())
            return [_alert(row) for row in connection.execute(query)]

    def trim(self, now: float) -> None:
        with self._database.writing() as connection:
            connection.execute(sa.delete(alerts).where(alerts.c.at < now - _KEEP_S))


def _alert(row: sa.Row) -> Alert:
    return Alert(row.id, row.account, row.key, row.kind, row.window, row.share, row.spent, row.limit, row.at, row.tries)
