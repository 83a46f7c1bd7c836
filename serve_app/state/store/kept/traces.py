"""Traces of requests, in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.kept.traces import ListedTrace, TraceQuery
from serve_app.state.store.callers.removed import removed_at
from serve_app.state.store.database import Database
from serve_app.state.store.tables import ledger, traces

_OLD = {"model": None, "status": None, "ms": None}


class TraceTable:
    """Keeps ``max_count`` traces of all accounts, the newest; looked at every :attr:`TRIM_EVERY` groups."""

    KIND = "trace"
    TRIM_EVERY = 32

    def __init__(self, database: Database, *, max_count: int = 20_000) -> None:
        self._database = database
        self._max_count = max_count
        self._groups = 0
        new = database.insert(traces)
        changed = {name: new.excluded[name] for name in ("ended", "body", "model", "status", "ms")}
        # A gateway that was thought dead tells of a stream that it has lost, perhaps after the one that has ended it.
        open_still = sa.or_(traces.c.status.is_(None), traces.c.status != "done", new.excluded.status == "done")
        self._put = new.on_conflict_do_update(index_elements=["account", "id"], set_=changed, where=open_still)

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Rows with the columns of the table; a later one of the same request replaces the earlier, unless that is
        its good end; requests that began before their account was removed go with it.
        """
        removed = removed_at(connection, (row["account"] for row in rows))
        # A journal of an older program has fewer columns.
        filled = [{**_OLD, **row} for row in rows]
        wanted = [row for row in filled if _began(row) > removed.get(row["account"], float("-inf"))]
        if wanted:
            connection.execute(self._put, wanted)
        if self._groups % self.TRIM_EVERY == 0:
            newest = sa.select(traces.c.ended).order_by(traces.c.ended.desc()).limit(1).offset(self._max_count)
            connection.execute(sa.delete(traces).where(traces.c.ended <= newest.scalar_subquery()))
        self._groups += 1

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        connection.execute(sa.delete(traces).where(traces.c.account == account))

    def body(self, account: str, request_id: str) -> bytes | None:
        query = sa.select(traces.c.body).where(traces.c.account == account, traces.c.id == request_id)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one_or_none()

    def list(self, query: TraceQuery) -> list[ListedTrace]:
        """The newest first, with what the ledger has of them."""
        wanted: list[sa.ColumnElement[bool]] = [traces.c.status.is_not(None)]
        for name in ("account", "model", "status"):
            if (value := getattr(query, name)) is not None:
                wanted.append(traces.c[name] == value)
        if query.min_ms is not None:
            wanted.append(traces.c.ms >= query.min_ms)
        if query.before is not None:
            wanted.append(traces.c.ended < query.before)
        newest = sa.select(traces).where(*wanted).order_by(traces.c.ended.desc(), traces.c.id).limit(query.limit)
        with self._database.reading() as connection:
            rows = connection.execute(newest).all()
            costs = sa.select(ledger.c.id, ledger.c.account, ledger.c.task, ledger.c.key, ledger.c.neurons,
                              ledger.c.money).where(ledger.c.id.in_([row.id for row in rows]))  # fmt: skip
            charged = {(row.account, row.id): row for row in connection.execute(costs)} if rows else {}
        return [ListedTrace(r.account, r.ended, r.ms, r.body, *_charge(charged.get((r.account, r.id)))) for r in rows]


def _began(row: dict[str, Any]) -> float:
    return row["ended"] - (row["ms"] or 0.0) / 1e3


def _charge(row: Any) -> tuple[str, str, int, int]:
    return ("", "", 0, 0) if row is None else (row.task, row.key, row.neurons, row.money)
