"""Conversations that clients name: a row for each, and a row for each item of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.protocols import Conversation
from serve_app.state.store.database import Database
from serve_app.state.store.tables import conversation_items, conversations

# What goes beyond an account's number or size, counted from the one that was used last.
_TRIM = sa.text("""
DELETE FROM conversations WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER latest AS number, sum(size) OVER latest AS total
        FROM conversations WHERE account = :account WINDOW latest AS (ORDER BY used DESC, id DESC)
    ) AS counted WHERE number > :count OR total > :bytes
)
""")
_ITEMS = conversation_items.c


class ConversationTable:
    """Keeps ``max_count`` conversations and ``max_bytes`` of them per account, each for ``max_age_s`` seconds after its
    last use; the longest unused go first. Bounds are looked at every :attr:`TRIM_EVERY` writes.
    """

    KIND = "conversation"
    TRIM_EVERY = 32

    def __init__(
        self, database: Database, *, max_age_s: float = 30 * 86400, max_count: int = 10_000, max_bytes: int = 256 << 20
    ) -> None:
        self._database = database
        self._max_age_s = max_age_s
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._written: dict[str, int] = {}

    def create(self, account: str, conversation_id: str, metadata: bytes) -> None:
        now = time.time()
        row = {"id": conversation_id, "account": account, "created": now, "used": now, "metadata": metadata}
        with self._database.writing() as connection:
            self._trim(connection, account)
            connection.execute(sa.insert(conversations).values(**row, next=0, size=len(metadata)))

    def find(self, account: str, conversation_id: str) -> Conversation | None:
        query = sa.select(conversations).where(self._own(account, conversation_id))
        with self._database.reading() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Conversation(row.id, row.created, row.next, row.size, row.metadata)

    def update(self, account: str, conversation_id: str, metadata: bytes) -> bool:
        """Whether there is such a conversation."""
        changed = {"metadata": metadata, "used": time.time()}
        with self._database.writing() as connection:
            query = sa.update(conversations).where(self._own(account, conversation_id)).values(**changed)
            return bool(connection.execute(query).rowcount)

    def delete(self, account: str, conversation_id: str) -> bool:
        with self._database.writing() as connection:
            query = sa.delete(conversations).where(self._own(account, conversation_id))
            return bool(connection.execute(query).rowcount)

    def add(self, account: str, conversation_id: str, items: Sequence[tuple[str, bytes]]) -> bool:
        """Adds items (id and JSON) at the end; False: there is no such conversation."""
        with self._database.writing() as connection:
            return self._add(connection, account, conversation_id, items)

    def write(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Adds ``items`` of each row to its ``conversation``; those of one that is gone go with it."""
        for row in rows:
            self._add(connection, row["account"], row["conversation"], row["items"])

    def items(
        self,
        conversation_id: str,
        *,
        after: str | None = None,
        before: int | None = None,
        limit: int,
        descending: bool = False,
    ) -> list[bytes]:
        """JSON of up to ``limit`` items behind the one whose id is ``after``, and at positions below ``before``."""
        query = sa.select(_ITEMS.item).where(_ITEMS.conversation == conversation_id)
        if before is not None:
            query = query.where(_ITEMS.position < before)
        if after is not None:
            place = sa.select(_ITEMS.position).where(_ITEMS.conversation == conversation_id, _ITEMS.id == after)
            seen = place.scalar_subquery()
            query = query.where(_ITEMS.position < seen if descending else _ITEMS.position > seen)
        order = _ITEMS.position.desc() if descending else _ITEMS.position
        with self._database.reading() as connection:
            return list(connection.execute(query.order_by(order).limit(limit)).scalars())

    def item(self, conversation_id: str, item_id: str) -> bytes | None:
        query = sa.select(_ITEMS.item).where(_ITEMS.conversation == conversation_id, _ITEMS.id == item_id)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one_or_none()

    def remove(self, account: str, conversation_id: str, item_id: str) -> bool:
        """Whether there was such an item."""
        one = (_ITEMS.conversation == conversation_id) & (_ITEMS.id == item_id)
        with self._database.writing() as connection:
            gone = connection.execute(sa.delete(conversation_items).where(one).returning(_ITEMS.item)).scalar()
            if gone is None:
                return False
            less = {"size": conversations.c.size - len(gone), "used": time.time()}
            connection.execute(sa.update(conversations).where(self._own(account, conversation_id)).values(**less))
            return True

    def _own(self, account: str, conversation_id: str) -> sa.ColumnElement[bool]:
        c = conversations.c
        return (c.id == conversation_id) & (c.account == account) & (c.used > time.time() - self._max_age_s)

    def _add(
        self, connection: Connection, account: str, conversation_id: str, items: Sequence[tuple[str, bytes]]
    ) -> bool:
        # The update locks the conversation, so that items of two writers do not get the same positions.
        more = {
            "next": conversations.c.next + len(items),
            "size": conversations.c.size + sum(len(item) for _, item in items),
            "used": time.time(),
        }
        own = self._own(account, conversation_id)
        growing = sa.update(conversations).where(own).values(**more).returning(conversations.c.next)
        following = connection.execute(growing).scalar_one_or_none()
        if following is None:
            return False
        rows = [
            {"conversation": conversation_id, "position": following - len(items) + i, "id": item_id, "item": item}
            for i, (item_id, item) in enumerate(items)
        ]
        # A group that is written twice, once from a journal, adds nothing the second time.
        put = self._database.insert(conversation_items).on_conflict_do_nothing(index_elements=["conversation", "id"])
        if rows:
            connection.execute(put, rows)
        self._trim(connection, account)
        return True

    def _trim(self, connection: Connection, account: str) -> None:
        """Looking at every row of an account is worth it now and then only; the bound is soft by this much."""
        count = self._written.get(account, 0)
        self._written[account] = count + 1
        if count % self.TRIM_EVERY == 0:
            connection.execute(sa.delete(conversations).where(conversations.c.used <= time.time() - self._max_age_s))
            bounds = {"count": self._max_count, "bytes": self._max_bytes}
            connection.execute(_TRIM, {"account": account, **bounds})
