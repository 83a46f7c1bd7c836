"""Conversations that clients name: a row for each, and a row for each item of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.state.protocols import Conversation
from serve_app.state.store.database import Database
from serve_app.state.store.kept.bounds import USUAL, Bounds, Keep
from serve_app.state.store.tables import conversation_items, conversations

_ITEMS = conversation_items.c


class ConversationTable:
    """The longest unused of an account go first."""

    KIND = "conversation"

    def __init__(self, database: Database, keep: Keep = USUAL) -> None:
        self._database = database
        self._bounds = Bounds(conversations, conversations.c.used, keep)

    def create(self, account: str, conversation_id: str, metadata: bytes) -> None:
        now = time.time()
        row = {"id": conversation_id, "account": account, "created": now, "used": now, "metadata": metadata}
        with self._database.writing() as connection:
            self._bounds.written(connection, account)
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

    def remove_account(self, connection: Connection, account: str, now: float) -> None:
        """Items go with their conversations, and those that are on their way find none."""
        connection.execute(sa.delete(conversations).where(conversations.c.account == account))

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
        return (c.id == conversation_id) & (c.account == account) & (c.used > self._bounds.since)

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
        self._bounds.written(connection, account)
        return True
