"""Responses that clients may build on or fetch again. A conversation is a chain of turns, each in its response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from serve_app.api.errors import InvalidInput, NotFound, StoreAway
from serve_app.state.protocols import ResponseStore, Row
from serve_app.state.reader import ReadPool, plausible
from serve_app.state.writer import GroupWriter

MAX_TURNS = 1000
# A client may name a response as soon as it has it, to any gateway: its answer ends when the response is in the store,
# or when the store has not taken it for this long. Then this gateway alone knows it until the store is back.
PATIENCE_S = 1.0
_KIND = "response"

# The messages of what a chain of responses begins with.
Beginning = Callable[[str], Awaitable[list[dict[str, Any]]]]


class Responses:
    """What this gateway has just stored, from memory; the rest from the store."""

    def __init__(self, store: ResponseStore, writer: GroupWriter, reader: ReadPool) -> None:
        self._store = store
        self._writer = writer
        self._reader = reader

    async def put(
        self, account: str, body: dict[str, Any], turn: list[dict[str, Any]], begins: str | None = None
    ) -> None:
        """Keeps a response with its ``turn``: the messages that were new in it, the answer's among them. ``begins``:
        see :meth:`conversation`.
        """
        packed, messages = orjson.dumps(body), orjson.dumps(turn)
        size = len(packed) + len(messages)
        columns = {
            "id": body["id"],
            "account": account,
            "created": time.time(),
            "previous": begins or body["previous_response_id"],
            "size": size,
            "turn": messages,
            "body": packed,
        }
        safe = self._writer.add(Row(_KIND, (account, body["id"]), columns, size), soon=True)
        await asyncio.wait([asyncio.wrap_future(safe)], timeout=PATIENCE_S)

    async def get(self, account: str, response_id: str) -> dict[str, Any]:
        """The response as it was sent. Raises `NotFound` and `StoreAway`."""
        waiting = self._writer.find(_KIND, (account, response_id))
        if waiting is not None:
            return orjson.loads(waiting["body"])
        found = await self._reader.run(self._store.body, account, response_id) if plausible(response_id) else None
        if found is None:
            raise _unknown(response_id)
        return orjson.loads(found)

    async def delete(self, account: str, response_id: str) -> None:
        """Raises `NotFound` and `StoreAway`."""
        for _ in range(10):
            if self._writer.find(_KIND, (account, response_id)) is None:
                break
            await asyncio.sleep(PATIENCE_S / 10)
        else:
            raise StoreAway  # what is deleted now would be written later
        gone = plausible(response_id) and await self._reader.run(self._store.delete, account, response_id)
        if not gone:
            raise _unknown(response_id)

    async def conversation(
        self, account: str, response_id: str | None, beginning: Beginning | None = None
    ) -> list[dict[str, Any]]:
        """All messages up to and with the response. Raises `InvalidInput` where a part of them is nowhere, and
        `StoreAway`. Of what :meth:`put` calls ``begins``, where a chain begins elsewhere, ``beginning`` tells.
        """
        turns: list[bytes] = []
        before: list[dict[str, Any]] = []
        while response_id is not None:
            if turns and beginning is not None and not response_id.startswith("resp_"):
                before = await beginning(response_id)
                break
            if len(turns) >= MAX_TURNS:
                raise broken_chain(response_id)
            waiting = self._writer.find(_KIND, (account, response_id))
            if waiting is not None:
                found = [(waiting["previous"], waiting["turn"])]
            elif plausible(response_id):
                left = MAX_TURNS - len(turns)
                found = await self._reader.run(self._store.chain, account, response_id, left)
            else:
                found = []
            if not found:
                raise broken_chain(response_id)
            turns = [turn for _, turn in found] + turns
            response_id = found[0][0]
        return [*before, *(message for turn in turns for message in orjson.loads(turn))]


def broken_chain(gone: str) -> InvalidInput:
    return InvalidInput(
        f"previous_response_id: response {gone[:200]} is not here (deleted, expired, never stored, or more than "
        f"{MAX_TURNS} turns back). Send the conversation in input instead.",
        param="previous_response_id",
    )


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"No response {response_id[:64]} is stored here (deleted, expired, or sent with store: false).")
