"""History in the store: a row for each minute or hour, gateway, account and model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Index, LargeBinary, String, Table
from sqlalchemy.engine import Connection

from serve_app.state.kept.history import EVERYBODY, KEPT_S, HistoryRow
from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# See `serve_app.state.kept.history.HistoryRow`. `numbers`: msgpack.
history = Table(
    "history",
    metadata,
    Column("width", BigInteger, primary_key=True, autoincrement=False),
    Column("account", String, primary_key=True),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("gateway", String, primary_key=True),
    Column("model", String, primary_key=True),
    Column("numbers", LargeBinary, nullable=False),
    Index("history_by_age", "width", "at"),
)
_GROUP = 500


class HistoryTable:
    """:class:`serve_app.state.kept.history.HistoryStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        new = database.insert(history)
        names = ["width", "account", "at", "gateway", "model"]
        self._put = new.on_conflict_do_update(index_elements=names, set_={"numbers": new.excluded.numbers})

    def write(self, rows: Sequence[HistoryRow]) -> None:
        for start in range(0, len(rows), _GROUP):
            packed = [
                {
                    "width": row.width,
                    "account": row.account,
                    "at": row.at,
                    "gateway": row.gateway,
                    "model": row.model,
                    "numbers": msgspec.msgpack.encode(list(row.numbers)),
                }
                for row in rows[start : start + _GROUP]
            ]
            with self._database.writing() as connection:
                connection.execute(self._put, packed)

    def read(
        self, width: int, since: int, until: int, account: str | None, model: str | None = None
    ) -> list[HistoryRow]:
        query = sa.select(history).where(history.c.width == width, history.c.at >= since, history.c.at < until)
        query = query.where(history.c.account == account if account is not None else history.c.account != EVERYBODY)
        if model is not None:
            query = query.where(history.c.model == model)
        with self._database.reading() as connection:
            return [
                HistoryRow(r.width, r.at, r.gateway, r.account, r.model, msgspec.msgpack.decode(r.numbers))
                for r in connection.execute(query)
            ]

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """What it did stays in the sums of everybody, and in the ledger."""
        connection.execute(sa.delete(history).where(history.c.account == account))

    def trim(self, now: float) -> None:
        with self._database.writing() as connection:
            for width, kept_s in KEPT_S.items():
                old = (history.c.width == width, history.c.at < int(now - kept_s))
                connection.execute(sa.delete(history).where(*old))
