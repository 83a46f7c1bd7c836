"""What a request would cost, without running it: a native route beside `/ai/run`, and one for bodies of all dialects.

Every dialect answers so where its body says `options: {"estimate": true}`, or its headers `x-estimate: true`. These
routes add the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import InvalidInput
from serve_app.api.fields.asked import ESTIMATE
from serve_app.api.fields.values import string
from serve_app.api.schema import usage as schemas
from serve_app.api.schema.openapi import Operation, Schema
from serve_app.api.types import GenerateRequest, TaskRequest
from serve_app.gateway.http.exchange import ACCOUNT, USE, Endpoint, Exchange
from serve_app.gateway.http.routes.dialects.native import NativeRoutes, run_operation
from serve_app.tasks.registry import taking

_TAG = "Usage"
# What says of a body without a route of its own which dialect it is written in: the first that fits. The one field
# that several dialects have, ``input``, goes by what the model does.
SIGNS = (
    (("text_1",), "/v1/score"),
    (("documents",), "/v1/rerank"),
    (("texts",), "/v1/rerank"),
    (("messages", "system"), "/v1/messages"),
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
)


def endpoints(exchange: Exchange, dialects: Sequence[Endpoint]) -> list[Endpoint]:
    """``dialects``: the routes of those that run models; what takes no body of theirs runs none."""
    routes = EstimateRoutes(exchange, [e for e in dialects if e.method == "POST" and e.about.body is not None])
    run = run_operation()
    native = Operation("What running a model would cost", _TAG, schemas.enveloped_estimate(), run.body, run.example)
    any_dialect = Operation(
        "What a request of any dialect would cost",
        _TAG,
        schemas.estimate(),
        schemas.estimate_input(),
        {"model": "@cf/pico/pico-instruct", "messages": [{"role": "user", "content": "What does math.sqrt do?"}]},
        _QUERY,
    )
    return [
        Endpoint("POST", ACCOUNT + "/ai/estimate/{model:path}", routes.native, native, scopes=USE),
        Endpoint("POST", ACCOUNT + "/ai/v1/estimate", routes.any_dialect, any_dialect, openai_body, USE),
        Endpoint("POST", "/v1/estimate", routes.any_dialect, any_dialect, openai_body, USE),
    ]


_QUERY: dict[str, Schema] = {"route": {"type": "string", "description": "The route the body is for, as /api/chat."}}


class EstimateRoutes:
    def __init__(self, exchange: Exchange, dialects: Sequence[Endpoint]) -> None:
        self._exchange = exchange
        self._dialects = dialects
        self._native = NativeRoutes(exchange)

    async def native(self, request: Request) -> Response:
        return await self._native.run(Request(_asking(request.scope), request.receive))

    async def any_dialect(self, request: Request) -> Response:
        body = await self._exchange.body(request, TaskRequest)
        path = request.query_params.get("route") or self._path(body)
        scope = {**_asking(request.scope), "path": path, "path_params": {}}
        raw, sent = request.state.raw_body, False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return await request.receive()
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}

        for endpoint in self._dialects:
            found, inner = Route(endpoint.path, endpoint.handler, methods=[endpoint.method]).matches(scope)
            if found is Match.FULL:
                # What runs a model ends with its estimate.
                await endpoint.handler(Request({**scope, **inner}, receive))
                break
        raise InvalidInput(f"route: POST {path[:120]} runs no model; /openapi.json has those that do.", param="route")

    def _path(self, body: dict[str, Any]) -> str:
        """The route that takes such a body."""
        for fields, path in SIGNS:
            if all(body.get(name) is not None for name in fields):
                return path
        name, asked = string(body, "model", limit=512), body.get("input")
        if not name:
            raise InvalidInput("model is missing; name one of GET /v1/models.", param="model")
        run = ACCOUNT.format(account=self._exchange.gateway.settings.account) + "/ai/run"
        if isinstance(asked, dict):
            return run
        if asked is None:
            return f"{run}/{name}"
        model = self._exchange.gateway.models.find(name)
        generates = model.record.task in (task.declaration.name for task in taking(GenerateRequest))
        return "/v1/responses" if generates else "/v1/embeddings"


def _asking(scope: Any) -> dict[str, Any]:
    """The request with the wish for an estimate. Its body has been unpacked."""
    left = {b"content-length", b"content-encoding", ESTIMATE.encode()}
    headers = [(name, value) for name, value in scope["headers"] if name not in left]
    return {**scope, "headers": [*headers, (ESTIMATE.encode(), b"true")]}
