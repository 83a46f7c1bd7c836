"""Adapters in the store: a row for each, and a row for each content that some had, which says when its blobs may go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Double, Index, String, Table
from sqlalchemy.engine import Connection

from serve_app.state.blobs.adapters import KEPT_S, Adapter, AdapterError, AdapterTaken, Order
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.queue_tables import metadata
from serve_app.state.store.revisions import bump

adapters = Table(
    "adapters",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("model", String, nullable=False),
    Column("name", String, nullable=False),
    Column("created", Double, nullable=False),
    Column("modified", Double, nullable=False),
    Column("description", String, nullable=False),
    Column("public", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("digest", String, nullable=False),
    Column("rank", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("opened", Boolean, nullable=False),
    Column("config", String, nullable=False),
    Column("weights", String, nullable=False),
    Column("problem", String, nullable=False),
    Index("adapters_by_name", "account", "name", unique=True),
    Index("adapters_by_digest", "digest"),
    Index("adapters_public", "public", "created", "id"),
)

# `left`: since when no adapter has it (unix seconds); of one that some have, when blobs were last written.
adapter_blobs = Table(
    "adapter_blobs",
    metadata,
    Column("digest", String, primary_key=True),
    Column("left", Double, nullable=False),
)
_NAMES = [field.name for field in fields(Adapter)]
_SERVED = ("version", "digest", "rank", "size", "opened", "config", "weights", "problem", "modified")
_SWEPT = 20


class AdapterTable:
    """:class:`serve_app.state.blobs.adapters.AdapterStore`."""

    NAME = "adapters"

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, adapter: Adapter, most: int) -> None:
        put = self._database.insert(adapters).values(**asdict(adapter))
        put = put.on_conflict_do_nothing(index_elements=["account", "name"]).returning(adapters.c.id)
        with self._database.writing(durable=True) as connection:
            if connection.execute(put).first() is None:
                raise AdapterTaken(
                    f"There is a fine-tune {adapter.name!r} already. Choose another name, or open a new version of it: "
                    f"POST .../finetunes/{adapter.name}/versions."
                )
            count = sa.select(sa.func.count()).select_from(adapters).where(adapters.c.account == adapter.account)
            if connection.execute(count).scalar_one() > most:
                raise AdapterError(f"Account {adapter.account} has {most} fine-tunes already. Delete one.")

    def find(self, account: str, which: str) -> Adapter | None:
        named = (adapters.c.id == which) | (adapters.c.name == which)
        own = adapters.c.account == account
        usable = own | (adapters.c.public & (adapters.c.digest != ""))
        first = sa.case((own, 0), else_=1), sa.case((adapters.c.id == which, 0), else_=1)
        query = sa.select(adapters).where(named, usable).order_by(*first, adapters.c.created, adapters.c.id).limit(1)
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        return None if row is None else _adapter(row)

    def own(self, account: str) -> list[Adapter]:
        query = sa.select(adapters).where(adapters.c.account == account).order_by(adapters.c.created, adapters.c.id)
        with self._database.reading() as connection:
            return [_adapter(row) for row in connection.execute(query)]

    def public(self, limit: int, offset: int = 0, order: Order = "created") -> list[Adapter]:
        usable = adapters.c.public & (adapters.c.digest != "")
        query = sa.select(adapters).where(usable).order_by(adapters.c[order], adapters.c.id)
        with self._database.reading() as connection:
            return [_adapter(row) for row in connection.execute(query.limit(limit).offset(offset))]

    def change(self, account: str, adapter_id: str, **changed: Any) -> Adapter | None:
        with self._database.writing(durable=True) as connection:
            update = sa.update(adapters).where(_own(account, adapter_id)).values(**changed)
            row = connection.execute(update.returning(*adapters.c)).first()
            if row is not None and "public" in changed:
                bump(self._database, connection, self.NAME)
        return None if row is None else _adapter(row)

    def serve(self, adapter: Adapter) -> bool:
        with self._database.writing(durable=True) as connection:
            known = (adapters.c.version == adapter.version - 1) & adapters.c.opened
            found = sa.select(adapters.c.digest).where(_own(adapter.account, adapter.id), known).with_for_update()
            before = connection.execute(found).scalar_one_or_none()
            if before is None:
                return False
            values = {name: getattr(adapter, name) for name in _SERVED}
            connection.execute(sa.update(adapters).where(adapters.c.id == adapter.id).values(**values))
            self._leave(connection, {before} - {"", adapter.digest}, adapter.modified)
            bump(self._database, connection, self.NAME)
        return True

    def remove(self, account: str, adapter_id: str, now: float) -> bool:
        with self._database.writing(durable=True) as connection:
            return bool(self._remove(connection, _own(account, adapter_id), now))

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """Removes all adapters of an account in somebody else's transaction."""
        self._remove(connection, adapters.c.account == account, now)

    def hold(self, digest: str, now: float) -> None:
        with self._database.writing(durable=True) as connection:
            self._left(connection, digest, now)

    def sweep(self, now: float, delete: Callable[[str], None]) -> None:
        """One transaction each: whoever writes blobs of this content again waits until they are gone."""
        had = sa.exists().where(adapters.c.digest == adapter_blobs.c.digest)
        old = (adapter_blobs.c.left <= now - KEPT_S) & ~had
        with self._database.reading() as connection:
            found = connection.scalars(sa.select(adapter_blobs.c.digest).where(old).limit(_SWEPT)).all()
        for digest in found:
            with self._database.writing() as connection:
                gone = sa.delete(adapter_blobs).where(adapter_blobs.c.digest == digest, old)
                if connection.execute(gone).rowcount:
                    _delete(delete, digest)

    def _remove(self, connection: Connection, which: sa.ColumnElement[bool], now: float) -> int:
        gone = connection.execute(sa.delete(adapters).where(which).returning(adapters.c.digest)).scalars().all()
        if gone:
            self._leave(connection, {digest for digest in gone if digest}, now)
            bump(self._database, connection, self.NAME)
        return len(gone)

    def _leave(self, connection: Connection, digests: set[str], now: float) -> None:
        for digest in sorted(digests):
            self._left(connection, digest, now)

    def _left(self, connection: Connection, digest: str, now: float) -> None:
        put = self._database.insert(adapter_blobs).values(digest=digest, left=now)
        connection.execute(put.on_conflict_do_update(index_elements=["digest"], set_={"left": now}))


def _delete(delete: Callable[[str], None], digest: str) -> None:
    try:
        delete(digest)
    except OSError as error:  # of the files, and not of the database
        raise AdapterError(f"Files of the fine-tune {digest[:12]} could not be deleted ({error}).") from error


def _own(account: str, adapter_id: str) -> sa.ColumnElement[bool]:
    return (adapters.c.id == adapter_id) & (adapters.c.account == account)


def _adapter(row: sa.Row) -> Adapter:
    return Adapter(**{name: getattr(row, name) for name in _NAMES})
