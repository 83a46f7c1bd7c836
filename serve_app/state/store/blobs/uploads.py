"""Uploaded files in the store: a row for each; their bytes are blobs."""

from __future__ import annotations

from dataclasses import asdict, fields

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Double, Index, String, Table
from sqlalchemy.engine import Connection
from sqlalchemy.engine import Row as SqlRow

from serve_app.state.blobs.uploads import Upload
from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# `expires`: None: never. Times: unix seconds.
uploads = Table(
    "uploads",
    metadata,
    Column("id", String, primary_key=True),
    Column("account", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("name", String, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("blob", String, nullable=False),
    Column("expires", Double),
    Column("print", String, nullable=False),
    Index("uploads_by_age", "account", "created", "id"),
    Index("uploads_by_end", "expires"),
)
_NAMES = [field.name for field in fields(Upload)]


class UploadTable:
    """:class:`serve_app.state.blobs.uploads.UploadStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, upload: Upload) -> Upload:
        put = self._database.insert(uploads).values(**asdict(upload)).on_conflict_do_nothing()
        with self._database.writing(durable=True) as connection:
            connection.execute(put)
            row = connection.execute(sa.select(uploads).where(uploads.c.id == upload.id)).one()
        return _upload(row)

    def find(self, account: str, upload_id: str, now: float) -> Upload | None:
        query = sa.select(uploads).where(_own(account, upload_id), _there(now))
        with self._database.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else _upload(row)

    def page(
        self,
        account: str,
        now: float,
        *,
        purpose: str = "",
        after: str = "",
        limit: int = 20,
        oldest_first: bool = False,
    ) -> list[Upload]:
        place = sa.tuple_(uploads.c.created, uploads.c.id)
        query = sa.select(uploads).where(uploads.c.account == account, _there(now)).limit(limit)
        if purpose:
            query = query.where(uploads.c.purpose == purpose)
        with self._database.reading() as connection:
            if after:
                at = sa.select(uploads.c.created, uploads.c.id).where(_own(account, after))
                known = connection.execute(at).one_or_none()
                if known is None:
                    return []
                query = query.where(place > sa.tuple_(*known) if oldest_first else place < sa.tuple_(*known))
            columns = (uploads.c.created, uploads.c.id)
            rows = connection.execute(query.order_by(*(c if oldest_first else c.desc() for c in columns))).all()
        return [_upload(row) for row in rows]

    def used(self, account: str, now: float) -> int:
        own = (uploads.c.account == account) & (uploads.c.purpose == "batch") & _there(now)
        with self._database.reading() as connection:
            return int(connection.execute(sa.select(sa.func.sum(uploads.c.size)).where(own)).scalar() or 0)

    def delete(self, account: str, upload_id: str) -> bool:
        with self._database.writing() as connection:
            return bool(connection.execute(sa.delete(uploads).where(_own(account, upload_id))).rowcount)

    def blobs(self) -> set[str]:
        with self._database.reading() as connection:
            return set(connection.execute(sa.select(uploads.c.blob)).scalars())

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """The account ends: its files expire."""
        connection.execute(sa.update(uploads).where(uploads.c.account == account).values(expires=now))

    def old(self, now: float, limit: int = 100) -> list[Upload]:
        query = sa.select(uploads).where(uploads.c.expires <= now).order_by(uploads.c.expires).limit(limit)
        with self._database.reading() as connection:
            return [_upload(row) for row in connection.execute(query)]


def _own(account: str, upload_id: str) -> sa.ColumnElement[bool]:
    return (uploads.c.id == upload_id) & (uploads.c.account == account)


def _there(now: float) -> sa.ColumnElement[bool]:
    return uploads.c.expires.is_(None) | (uploads.c.expires > now)


def _upload(row: SqlRow) -> Upload:
    return Upload(**{name: getattr(row, name) for name in _NAMES})
