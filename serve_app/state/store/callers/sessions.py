"""Sessions in the store. Ended ones stay until they would have expired, so that no code begins a second one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy import Boolean, Column, Double, Index, String, Table

from serve_app.state.callers.sessions import LONGEST_S, MOST_OF_A_KEY, Session
from serve_app.state.store import revisions
from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# See `serve_app.state.callers.sessions.Session`. `code`: null for none. Times: unix seconds.
sessions = Table(
    "sessions",
    metadata,
    Column("hash", String, primary_key=True),
    Column("key", String, nullable=False),
    Column("started", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("code", String, unique=True),
    Column("ended", Boolean, nullable=False),
    Index("sessions_by_key", "key", "started"),
    Index("sessions_by_age", "started"),
)


class SessionTable:
    """:class:`serve_app.state.callers.sessions.SessionStore`."""

    NAME = "sessions"

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, session: Session) -> bool:
        row = {**asdict(session), "code": session.code or None, "ended": False}
        new = self._database.insert(sessions).values(**row).on_conflict_do_nothing().returning(sessions.c.hash)
        of_key = sa.select(sessions.c.hash).where(sessions.c.key == session.key, ~sessions.c.ended)
        newest = of_key.order_by(sessions.c.started.desc(), sessions.c.hash).limit(MOST_OF_A_KEY).subquery()
        older = sa.update(sessions).where(sessions.c.key == session.key, sessions.c.hash.not_in(sa.select(newest)))
        with self._database.writing() as connection:
            if connection.execute(new).first() is None:
                return False
            connection.execute(older.values(ended=True))
            revisions.bump(self._database, connection, self.NAME)
        return True

    def all(self, now: float) -> list[Session]:
        # What was used lately is known to gateways before it is here.
        live = (~sessions.c.ended, sessions.c.started > now - LONGEST_S)
        with self._database.reading() as connection:
            rows = connection.execute(sa.select(sessions).where(*live))
            return [Session(row.hash, row.key, row.started, row.used, row.code or "") for row in rows]

    def end(self, hash: str) -> None:
        """From now on every gateway refuses it, once it has looked."""
        with self._database.writing() as connection:
            connection.execute(sa.update(sessions).where(sessions.c.hash == hash).values(ended=True))
            revisions.bump(self._database, connection, self.NAME)

    def used(self, when: Mapping[str, float]) -> None:
        """Later uses only."""
        rows = [{"key_": hash, "at": at} for hash, at in sorted(when.items())]
        if not rows:
            return
        later = (sessions.c.hash == sa.bindparam("key_"), sessions.c.used < sa.bindparam("at"))
        with self._database.writing() as connection:
            connection.execute(sa.update(sessions).where(*later).values(used=sa.bindparam("at")), rows)
            revisions.bump(self._database, connection, self.NAME)

    def trim(self, now: float) -> None:
        with self._database.writing() as connection:
            connection.execute(sa.delete(sessions).where(sessions.c.started <= now - LONGEST_S))
