"""Stored responses. Each row is one turn (the messages asked and answered) with the id of the turn before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.store.callers.removed import removed_at
from serve_app.state.store.database import Database
from serve_app.state.store.kept.bounds import USUAL, Bounds, Keep
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


class ResponseTable:
    """The oldest of an account go first."""

    KIND = "response"

    def __init__(self, database: Database, keep: Keep = USUAL) -> None:
        self._database = database
        self._bounds = Bounds(responses, responses.c.created, keep)
        self._put = database.insert(responses).on_conflict_do_nothing()

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Rows with the columns of the table; one that is there already stays, and what an account had asked for
        before it was removed goes with it.
        """
        removed = removed_at(connection, (row["account"] for row in rows))
        wanted = [row for row in rows if not _of_before(row, removed.get(row["account"]))]
        if wanted:
            connection.execute(self._put, wanted)
        for row in wanted:
            self._bounds.written(connection, row["account"])

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        connection.execute(sa.delete(responses).where(responses.c.account == account))

    def body(self, account: str, response_id: str) -> bytes | None:
        query = sa.select(responses.c.body).where(
            responses.c.id == response_id, responses.c.account == account, responses.c.created > self._bounds.since
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
        asked = {"id": response_id, "account": account, "since": self._bounds.since, "turns": turns}
        with self._database.reading() as connection:
            return [(row.previous, row.turn) for row in connection.execute(_CHAIN, asked)]


def _of_before(row: dict[str, Any], removed: float | None) -> bool:
    """Whether it was asked for before its account was ``removed`` (None: it was not)."""
    # The answer says in whole seconds when it was asked for.
    return removed is not None and (row["created"] <= removed or orjson.loads(row["body"])["created_at"] + 1 <= removed)
