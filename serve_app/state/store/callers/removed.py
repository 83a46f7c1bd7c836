"""When accounts were removed, so that what was on its way to the store by then does not come back under their names."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import Column, Double, String, Table
from sqlalchemy.engine import Connection

from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# `at`: unix seconds, of the last time.
removed_accounts = Table(
    "removed_accounts",
    metadata,
    Column("account", String, primary_key=True),
    Column("at", Double, nullable=False),
)


def note_removed(database: Database, connection: Connection, account: str, now: float) -> None:
    put = database.insert(removed_accounts).values(account=account, at=now)
    connection.execute(put.on_conflict_do_update(index_elements=["account"], set_={"at": now}))


def removed_at(connection: Connection, accounts: Iterable[str]) -> dict[str, float]:
    """Those of the ``accounts`` that were removed, and when; there may be others of their names by now."""
    c = removed_accounts.c
    query = sa.select(c.account, c.at).where(c.account.in_(set(accounts)))
    return {row.account: row.at for row in connection.execute(query)}
