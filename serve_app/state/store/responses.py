"""Stored responses. Each row is one turn (the messages asked and answered) with the id of the turn before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.store.database import Database
from serve_app.state.store.tables import responses

_CHAIN = sa.text("""
WITH RECURSIVE chain (depth, id, previous, turn) AS (
    SELECT 0, id, previous, turn FROM responses WHERE id = :id AND account = :account AND created > :since
    UNION ALL
    SELECT depth + 1, r.id, r.previous, r.turn FROM chain JOIN responses r ON r.id = chain.previous
    WHERE r.account = :account AND r.created > :since AND depth + 1 < :turns
)
SELECT previous, turn FROM chain ORDER BY depth DESC
""")
# What goes beyond an account's number or size, counted from the newest.
_TRIM = sa.text("""
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS number, sum(size) OVER newest AS total
        FROM responses WHERE account = :account WINDOW newest AS (ORDER BY created DESC, id DESC)
    ) AS counted WHERE number > :count OR total > :bytes
)
""")


class ResponseTable:
    """Keeps ``max_count`` responses and ``max_bytes`` of them per account, each for ``max_age_s`` seconds; the oldest
    go first. Bounds are looked at every :attr:`TRIM_EVERY` writes.
    """

    KIND = "response"
    TRIM_EVERY = 32

    def __init__(
        self, database: Database, *, max_age_s: float = 30 * 86400, max_count: int = 10_000, max_bytes: int = 256 << 20
    ) -> None:
        self._database = database
        self._max_age_s = max_age_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._written: dict[str, int] = {}
        self._put = database.insert(responses).on_conflict_do_nothing()

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Rows with the columns of the table; one that is there already stays."""
        connection.execute(self._put, list(rows))
        for row in rows:
            count = self._written.get(row["account"], 0)
            self._written[row["account"]] = count + 1
            # Looking at every row of an account is worth it now and then only; the bound is soft by this much.
            if count % self.TRIM_EVERY == 0:
                connection.execute(sa.delete(responses).where(responses.c.created <= self._since))
                bounds = {"count": self._max_count, "bytes": self._max_bytes}
                connection.execute(_TRIM, {"account": row["account"], **bounds})

    def body(self, account: str, response_id: str) -> bytes | None:
        query = sa.select(responses.c.body).where(
            responses.c.id == response_id, responses.c.account == account, responses.c.created > self._since
        )
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one_or_none()

    def delete(self, account: str, response_id: str) -> bool:
        """Whether there was such a response."""
        query = sa.delete(responses).where(responses.c.id == response_id, responses.c.account == account)
        with self._database.writing() as connection:
            return bool(connection.execute(query).rowcount)

    def chain(self, account: str, response_id: str, turns: int) -> list[tuple[str | None, bytes]]:
        """Turns up to and with the response, oldest first, as far back as they are here and at most ``turns``: each
        the id of the one before it, and its messages as JSON.
        """
        asked = {"id": response_id, "account": account, "since": self._since, "turns": turns}
        with self._database.reading() as connection:
            return [(row.previous, row.turn) for row in connection.execute(_CHAIN, asked)]

    @property
    def _since(self) -> float:
        return time.time() - self._max_age_s
