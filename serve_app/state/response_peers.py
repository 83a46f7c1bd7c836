"""The stored responses of all nodes' gateways as one store: what is not on this node is asked of the others.

Each node keeps what its own gateways answered; a conversation whose turns went to several nodes is put together from
them. A gateway that does not answer counts as one that has nothing: the client is then told to send the conversation.
"""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import NotFound
from serve_app.state.peers import Peers
from serve_app.state.responses import MAX_TURNS, ResponseStore, broken_chain


class PeerResponses:
    """The interface of `ResponseStore`, over ``store`` and the other gateways'."""

    def __init__(self, store: ResponseStore, peers: Peers) -> None:
        self._store = store
        self._peers = peers

    async def answer(self, method: str, wire: dict[str, Any]) -> Any:
        """For another gateway: what this node has, or None."""
        account, response_id = wire["account"], wire["id"]
        try:
            if method == "get":
                return await self._store.get(account, response_id)
            if method == "delete":
                await self._store.delete(account, response_id)
                return True
        except NotFound:
            return None
        return await self._store.chain(account, response_id)

    async def put(self, account: str, body: dict[str, Any], turn: list[dict[str, Any]]) -> None:
        await self._store.put(account, body, turn)

    async def get(self, account: str, response_id: str) -> dict[str, Any]:
        """Raises `NotFound`."""
        try:
            return await self._store.get(account, response_id)
        except NotFound:
            for found in await self._peers.have("get", account, response_id):
                return found
            raise

    async def delete(self, account: str, response_id: str) -> None:
        """Raises `NotFound`."""
        try:
            await self._store.delete(account, response_id)
        except NotFound:
            if not await self._peers.have("delete", account, response_id):
                raise

    async def conversation(self, account: str, response_id: str | None) -> list[dict[str, Any]]:
        """All messages up to and with the response. Raises `InvalidInput` where a part of them is nowhere."""
        pieces: list[list[dict[str, Any]]] = []
        turns = 0
        while response_id is not None:
            found = await self._store.chain(account, response_id)
            if found is None:
                found = next(iter(await self._peers.have("chain", account, response_id)), None)
            if found is None or turns >= MAX_TURNS:
                raise broken_chain(response_id)
            messages, count, response_id = found
            turns += count
            pieces.insert(0, messages)
        return [message for piece in pieces for message in piece]

    def close(self) -> None:
        self._store.close()
