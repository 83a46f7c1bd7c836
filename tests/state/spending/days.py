"""Which days of the ledger are closed, as a test has it."""

from __future__ import annotations

import sqlalchemy as sa

from serve_app.state.spending.ledger import DAY_S
from serve_app.state.store.spending.closing import closed_until
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger_closed


def begin(store: SqlStore, at: int) -> None:
    """As if this had been today when the store was made."""
    with store.database.writing() as connection:
        connection.execute(sa.update(ledger_closed).values(until=at // DAY_S))


def close_days(store: SqlStore, now: float) -> None:
    while store.ledger.close_days(now):
        pass


def mark(store: SqlStore) -> int:
    """When the first day begins that is not closed, in unix seconds."""
    with store.database.reading() as connection:
        return closed_until(connection) * DAY_S
