"""Responses that clients may build on or fetch again, in an SQLite file that every gateway of the node shares.

Each row holds one turn (the messages asked and answered) and the id of the turn before it; a conversation is the chain.
Bounded three ways, per account in number and size and for all in age: the oldest go first.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput, NotFound
from serve_app.state.sqlite_file import open_shared

MAX_TURNS = 1000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, account TEXT NOT NULL, created REAL NOT NULL, previous TEXT,
    size INTEGER NOT NULL, turn BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (account, created);
"""
_CHAIN = """
WITH RECURSIVE chain (depth, id, previous, turn) AS (
    SELECT 0, id, previous, turn FROM responses WHERE id = :id AND account = :account AND created > :since
    UNION ALL
    SELECT depth + 1, r.id, r.previous, r.turn FROM chain JOIN responses r ON r.id = chain.previous
    WHERE r.account = :account AND r.created > :since AND depth < :turns
)
SELECT previous, turn FROM chain ORDER BY depth DESC
"""
# What goes beyond the account's number or size, counted from the newest.
_TRIM = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER newest AS number, sum(size) OVER newest AS total
        FROM responses WHERE account = :account WINDOW newest AS (ORDER BY created DESC, rowid DESC)
    ) WHERE number > :count OR total > :bytes
)
"""


class ResponseStore:
    """``max_age_s`` seconds, ``max_count`` responses and ``max_bytes`` of them per account.

    Calls block for a disk write at most, and run in threads; the file is opened at first use.
    """

    def __init__(
        self, path: Path, *, max_age_s: float = 30 * 86400, max_count: int = 10_000, max_bytes: int = 256 << 20
    ) -> None:
        self._path = path
        self._max_age_s = max_age_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._puts = 0

    async def put(self, account: str, body: dict[str, Any], turn: list[dict[str, Any]]) -> None:
        """Keeps a response with its ``turn``: the messages that were new in it, the answer's among them."""
        await asyncio.to_thread(self._put, account, body, turn)

    async def get(self, account: str, response_id: str) -> dict[str, Any]:
        """The response as it was sent. Raises `NotFound`."""
        return await asyncio.to_thread(self._get, account, response_id)

    async def delete(self, account: str, response_id: str) -> None:
        """Raises `NotFound`."""
        await asyncio.to_thread(self._delete, account, response_id)

    async def conversation(self, account: str, response_id: str | None) -> list[dict[str, Any]]:
        """All messages up to and with the response. Raises `InvalidInput` where a part of them is not here any more."""
        if response_id is None:
            return []
        found = await self.chain(account, response_id)
        if found is None or found[2] is not None:
            raise broken_chain(response_id if found is None else found[2] or "")
        return found[0]

    async def chain(self, account: str, response_id: str) -> tuple[list[dict[str, Any]], int, str | None] | None:
        """The messages of the turns up to and with the response, as far back as they are here; how many turns that
        is; and the turn before them, which is not here. None where the response itself is not."""
        return await asyncio.to_thread(self._chain, account, response_id)

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _put(self, account: str, body: dict[str, Any], turn: list[dict[str, Any]]) -> None:
        packed, messages = orjson.dumps(body), orjson.dumps(turn)
        now = time.time()
        row = (body["id"], account, now, body["previous_response_id"], len(packed) + len(messages), messages, packed)
        with self._lock, self._open() as db:
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            # Looking at every row of an account is worth it now and then only; the bound is then soft by this much.
            if self._puts % 32 == 0:
                db.execute("DELETE FROM responses WHERE created <= ?", (now - self._max_age_s,))
                db.execute(_TRIM, {"account": account, "count": self._max_count, "bytes": self._max_bytes})
            self._puts += 1

    def _get(self, account: str, response_id: str) -> dict[str, Any]:
        query = "SELECT body FROM responses WHERE id = ? AND account = ? AND created > ?"
        with self._lock, self._open() as db:
            row = db.execute(query, (response_id, account, self._since)).fetchone()
        if row is None:
            raise _unknown(response_id)
        return orjson.loads(row[0])

    def _delete(self, account: str, response_id: str) -> None:
        with self._lock, self._open() as db:
            gone = db.execute("DELETE FROM responses WHERE id = ? AND account = ?", (response_id, account)).rowcount
        if not gone:
            raise _unknown(response_id)

    def _chain(self, account: str, response_id: str) -> tuple[list[dict[str, Any]], int, str | None] | None:
        asked = {"id": response_id, "account": account, "since": self._since, "turns": MAX_TURNS}
        with self._lock, self._open() as db:
            rows = db.execute(_CHAIN, asked).fetchall()
        if not rows:
            return None
        return [message for _, turn in rows for message in orjson.loads(turn)], len(rows), rows[0][0]

    @property
    def _since(self) -> float:
        return time.time() - self._max_age_s

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = open_shared(self._path, _SCHEMA, durable=True)
        return self._db


def broken_chain(gone: str) -> InvalidInput:
    return InvalidInput(
        f"previous_response_id: response {gone} is not here (deleted, expired, never stored, or more than "
        f"{MAX_TURNS} turns back). Send the conversation in input instead.",
        param="previous_response_id",
    )


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"No response {response_id[:64]} is stored here (deleted, expired, or sent with store: false).")
