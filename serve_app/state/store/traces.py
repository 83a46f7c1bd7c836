"""Traces of requests, in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.store.database import Database
from serve_app.state.store.tables import traces


class TraceTable:
    """Keeps ``max_count`` traces of all accounts, the newest; looked at every :attr:`TRIM_EVERY` groups."""

    KIND = "trace"
    TRIM_EVERY = 32

    def __init__(self, database: Database, *, max_count: int = 20_000) -> None:
        self._database = database
        self._max_count = max_count
        self._groups = 0
        new = database.insert(traces)
        self._put = new.on_conflict_do_update(
            index_elements=["account", "id"], set_={"ended": new.excluded.ended, "body": new.excluded.body}
        )

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Rows with the columns of the table; a later one of the same request replaces the earlier."""
        connection.execute(self._put, list(rows))
        if self._groups % self.TRIM_EVERY == 0:
            newest = sa.select(traces.c.ended).order_by(traces.c.ended.desc()).limit(1).offset(self._max_count)
            connection.execute(sa.delete(traces).where(traces.c.ended <= newest.scalar_subquery()))
        self._groups += 1

    def body(self, account: str, request_id: str) -> bytes | None:
        query = sa.select(traces.c.body).where(traces.c.account == account, traces.c.id == request_id)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one_or_none()
