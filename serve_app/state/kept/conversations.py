"""Conversations that clients name. Nothing of them is in memory but what is on its way to the store."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import orjson

from serve_app.api.errors import ApiError, InvalidInput, NotFound, StoreAway
from serve_app.state.kept.responses import PATIENCE_S
from serve_app.state.protocols import Conversation, ConversationStore, Row
from serve_app.state.reader import ReadPool, plausible
from serve_app.state.writer import GroupWriter

MAX_ITEMS = 4096
MAX_BYTES = 16 << 20


class Conversations:
    """All methods but :meth:`create` and :meth:`append` raise `NotFound` for a conversation that the account does not
    have, and all but :meth:`append` `StoreAway`.
    """

    def __init__(self, store: ConversationStore, writer: GroupWriter, reader: ReadPool) -> None:
        self._store = store
        self._writer = writer
        self._reader = reader
        # Rows of this gateway that may not be in the store yet, by conversation.
        self._waiting: dict[str, list[tuple[str, ...]]] = {}

    async def create(self, account: str, metadata: dict[str, str], items: list[dict[str, Any]]) -> Conversation:
        """A new conversation that holds ``items``, each of which has an id."""
        conversation_id = f"conv_{secrets.token_hex(16)}"
        await self._reader.run(self._store.create, account, conversation_id, orjson.dumps(metadata))
        if items:
            await self._reader.run(self._store.add, account, conversation_id, _packed(items))
        return await self.get(account, conversation_id)

    async def get(self, account: str, conversation_id: str) -> Conversation:
        found = None
        if plausible(conversation_id):
            found = await self._reader.run(self._store.find, account, conversation_id)
        if found is None:
            raise unknown(conversation_id)
        return found

    async def update(self, account: str, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        packed = orjson.dumps(metadata)
        if not plausible(conversation_id) or not await self._reader.run(
            self._store.update, account, conversation_id, packed
        ):
            raise unknown(conversation_id)
        return await self.get(account, conversation_id)

    async def delete(self, account: str, conversation_id: str) -> None:
        if not plausible(conversation_id) or not await self._reader.run(self._store.delete, account, conversation_id):
            raise unknown(conversation_id)

    async def add(self, account: str, conversation_id: str, items: list[dict[str, Any]]) -> None:
        """Adds ``items``, each of which has an id. Raises `InvalidInput` for more than a conversation holds."""
        found, packed = await self._current(account, conversation_id), _packed(items)
        if found.size + sum(len(item) for _, item in packed) > MAX_BYTES:
            raise InvalidInput(f"A conversation has at most {MAX_BYTES} bytes; begin a new one.", param="items")
        if not await self._reader.run(self._store.add, account, conversation_id, packed):
            raise unknown(conversation_id)

    async def append(self, account: str, conversation_id: str, key: str, items: list[dict[str, Any]]) -> None:
        """Adds the items of the request ``key``, through the journal where the store is away: its client has been told
        of them. Returns when they are safe, or after a second.
        """
        packed = _packed(items)
        row_key = (account, conversation_id, key)
        columns = {"account": account, "conversation": conversation_id, "items": packed}
        row = Row(self._store.KIND, row_key, columns, sum(len(item) for _, item in packed))
        waiting = [one for one in self._waiting.get(conversation_id, ()) if self._waits(one)]
        self._waiting[conversation_id] = [*waiting, row_key]
        safe = self._writer.add(row, soon=True)
        await asyncio.wait([asyncio.wrap_future(safe)], timeout=PATIENCE_S)
        self._forget(conversation_id)

    async def load(self, account: str, conversation_id: str, before: int | None = None) -> tuple[list[Any], int]:
        """All items, or those at positions below ``before``, in order; and the position of the next one. Raises
        `InvalidInput` for more than one request can take.
        """
        found = await self._current(account, conversation_id)
        before = found.next if before is None else min(before, found.next)
        if found.size > MAX_BYTES:
            raise _too_much(f"{MAX_BYTES} bytes")
        items = await self._reader.run(self._store.items, conversation_id, before=before, limit=MAX_ITEMS + 1)
        if len(items) > MAX_ITEMS:
            raise _too_much(f"{MAX_ITEMS} items")
        return [orjson.loads(item) for item in items], before

    async def items(
        self, account: str, conversation_id: str, *, after: str | None, limit: int, descending: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        """Up to ``limit`` items behind the one whose id is ``after``, and whether there are more."""
        await self._current(account, conversation_id)
        if after is not None:
            await self.item(account, conversation_id, after)
        found = await self._reader.run(
            self._store.items, conversation_id, after=after, limit=limit + 1, descending=descending
        )
        return [orjson.loads(item) for item in found[:limit]], len(found) > limit

    async def item(self, account: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        await self._current(account, conversation_id)
        found = await self._reader.run(self._store.item, conversation_id, item_id) if plausible(item_id) else None
        if found is None:
            raise _no_item(conversation_id, item_id)
        return orjson.loads(found)

    async def remove(self, account: str, conversation_id: str, item_id: str) -> Conversation:
        """The conversation without that item."""
        await self.item(account, conversation_id, item_id)
        if not await self._reader.run(self._store.remove, account, conversation_id, item_id):
            raise _no_item(conversation_id, item_id)
        return await self.get(account, conversation_id)

    async def _current(self, account: str, conversation_id: str) -> Conversation:
        """The conversation, once the store has what this gateway has added to it."""
        for _ in range(10):
            if not any(map(self._waits, self._waiting.get(conversation_id, ()))):
                break
            await asyncio.sleep(PATIENCE_S / 10)
        else:
            raise StoreAway
        self._forget(conversation_id)
        return await self.get(account, conversation_id)

    def _waits(self, key: tuple[str, ...]) -> bool:
        return self._writer.find(self._store.KIND, key) is not None

    def _forget(self, conversation_id: str) -> None:
        if not any(map(self._waits, self._waiting.get(conversation_id, ()))):
            self._waiting.pop(conversation_id, None)


def unknown(conversation_id: str) -> ApiError:
    message = f"No conversation {conversation_id[:64]} is stored here (deleted, expired, or never created)."
    return NotFound(message, param="conversation")


def _too_much(bound: str) -> ApiError:
    return InvalidInput(f"The conversation has more than {bound}; begin a new one.", param="conversation")


def _no_item(conversation_id: str, item_id: str) -> ApiError:
    return NotFound(f"Conversation {conversation_id} has no item {item_id[:64]}.", param="item_id")


def _packed(items: list[dict[str, Any]]) -> list[tuple[str, bytes]]:
    return [(item["id"], orjson.dumps(item)) for item in items]
