"""Attempts to sign in with what is no key, by address, over all gateways."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Double, String, Table

from serve_app.state.store.database import Database
from serve_app.state.store.tables import metadata

# `since`: when the address's window began (unix seconds).
attempts = Table(
    "sign_in_attempts",
    metadata,
    Column("address", String, primary_key=True),
    Column("since", Double, nullable=False),
    Column("count", BigInteger, nullable=False),
)


class AttemptTable:
    """:class:`serve_app.state.callers.attempts.AttemptStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, address: str, now: float, window_s: float) -> tuple[float, int]:
        new = self._database.insert(attempts).values(address=address, since=now, count=1)
        over = attempts.c.since <= now - window_s
        counted = {
            "since": sa.case((over, now), else_=attempts.c.since),
            "count": sa.case((over, 1), else_=attempts.c.count + 1),
        }
        put = new.on_conflict_do_update(index_elements=["address"], set_=counted)
        with self._database.writing() as connection:
            since, count = connection.execute(put.returning(attempts.c.since, attempts.c.count)).one()
            return since, count

    def forgive(self, address: str) -> None:
        one = sa.update(attempts).where(attempts.c.address == address, attempts.c.count > 0)
        with self._database.writing() as connection:
            connection.execute(one.values(count=attempts.c.count - 1))

    def trim(self, before: float) -> None:
        with self._database.writing() as connection:
            connection.execute(sa.delete(attempts).where(attempts.c.since <= before))
