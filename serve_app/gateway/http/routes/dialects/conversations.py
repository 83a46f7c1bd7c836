"""Routes of conversations, which responses are made in."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.fields.content import ANY_KIND
from serve_app.api.responses.conversation import (
    parse_create,
    parse_items,
    parse_page,
    parse_update,
    render_conversation,
    render_page,
)
from serve_app.api.schema import conversations as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import GenerateRequest
from serve_app.gateway.http.exchange import USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.state.kept.conversations import Conversations
from serve_app.state.protocols import Conversation

_TAG = "OpenAI Conversations"
_ITEM = {"type": "message", "role": "user", "content": "What does math.sqrt do?"}
CREATE = Operation(
    "Begin a conversation", _TAG, schemas.conversation(), schemas.create_input(), {"metadata": {"topic": "maths"}}
)
GET = Operation("A conversation", _TAG, schemas.conversation())
UPDATE = Operation(
    "Change a conversation's metadata", _TAG, schemas.conversation(), schemas.update_input(), {"metadata": {"a": "b"}}
)
DELETE = Operation("Forget a conversation", _TAG, schemas.deleted())
ITEMS = Operation("The items of a conversation", _TAG, schemas.items(), query=schemas.page_query())
ADD = Operation("Add items to a conversation", _TAG, schemas.items(), schemas.items_input(), {"items": [_ITEM]})
ITEM = Operation("One item of a conversation", _TAG)
REMOVE = Operation("Take an item out of a conversation", _TAG, schemas.conversation())


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in OPENAI for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = ConversationRoutes(exchange)
    one = prefix + "/conversations/{conversation_id}"
    return [
        Endpoint("POST", prefix + "/conversations", routes.create, CREATE, openai_body),
        Endpoint("GET", one, routes.get, GET, openai_body, USE),
        Endpoint("POST", one, routes.update, UPDATE, openai_body),
        Endpoint("DELETE", one, routes.delete, DELETE, openai_body),
        Endpoint("GET", one + "/items", routes.items, ITEMS, openai_body, USE),
        Endpoint("POST", one + "/items", routes.add, ADD, openai_body),
        Endpoint("GET", one + "/items/{item_id}", routes.item, ITEM, openai_body, USE),
        Endpoint("DELETE", one + "/items/{item_id}", routes.remove, REMOVE, openai_body),
    ]


class ConversationRoutes:
    """What an item holds is any model's matter: which kinds of content are taken is asked where one answers."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def _store(self) -> Conversations:
        return self._exchange.gateway.state.conversations

    async def create(self, request: Request) -> Response:
        metadata, items = parse_create(await self._exchange.body(request, GenerateRequest), ANY_KIND)
        return _shown(await self._store.create(request.state.account, metadata, items))

    async def get(self, request: Request) -> Response:
        return _shown(await self._store.get(*_named(request)))

    async def update(self, request: Request) -> Response:
        metadata = parse_update(await self._exchange.body(request, GenerateRequest))
        return _shown(await self._store.update(*_named(request), metadata))

    async def delete(self, request: Request) -> Response:
        account, conversation_id = _named(request)
        await self._store.delete(account, conversation_id)
        return json_answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        after, limit, descending = parse_page(request.query_params)
        found, more = await self._store.items(*_named(request), after=after, limit=limit, descending=descending)
        return json_answer(render_page(found, more))

    async def add(self, request: Request) -> Response:
        items = parse_items(await self._exchange.body(request, GenerateRequest), ANY_KIND)
        await self._store.add(*_named(request), items)
        return json_answer(render_page(items))

    async def item(self, request: Request) -> Response:
        return json_answer(await self._store.item(*_named(request), request.path_params["item_id"]))

    async def remove(self, request: Request) -> Response:
        return _shown(await self._store.remove(*_named(request), request.path_params["item_id"]))


def _named(request: Request) -> tuple[str, str]:
    return request.state.account, request.path_params["conversation_id"]


def _shown(found: Conversation) -> Response:
    return json_answer(render_conversation(found.id, found.created, orjson.loads(found.metadata)))
