"""Routes about the server itself: health, counters, the OpenAPI document and the page that shows it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app import __version__
from serve_app.api.retry_after import LEAST_S, wait_header
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.docs_page import PAGE
from serve_app.gateway.http.exchange import READ, Endpoint, Exchange, json_answer
from serve_app.gateway.status import status

_TAG = "Server"
_HTML = {"type": "string"}


def endpoints(exchange: Exchange, document: Callable[[], dict[str, Any]]) -> list[Endpoint]:
    """``document`` gives the OpenAPI document, which describes these routes as well."""
    routes = AboutRoutes(exchange, document)
    page = Operation("This API as a page to try it on", _TAG, _HTML, media_type="text/html")
    return [
        Endpoint("GET", "/health", routes.health, Operation("Which models are ready", _TAG), scopes=None),
        Endpoint("GET", "/openapi.json", routes.openapi, Operation("This API as OpenAPI 3.1", _TAG), scopes=None),
        Endpoint("GET", "/docs", routes.docs, page, scopes=None),
        Endpoint("GET", "/ping", routes.ping, Operation("Whether the gateway answers", _TAG), scopes=None),
        Endpoint("GET", "/version", routes.version, Operation("The version of this server", _TAG), scopes=None),
        Endpoint("GET", "/v1/status", routes.status, Operation("Counters of every model's workers", _TAG), scopes=READ),
    ]


class AboutRoutes:
    def __init__(self, exchange: Exchange, document: Callable[[], dict[str, Any]]) -> None:
        self._exchange = exchange
        self._document = document
        self._written: bytes | None = None

    async def health(self, request: Request) -> Response:
        gateway = self._exchange.gateway
        report = {**gateway.health.report(), "store": gateway.state.health(), **gateway.tally.neighbours.health()}
        ready = report["status"] == "ready"
        headers = {} if ready else wait_header(LEAST_S)
        return Response(orjson.dumps(report), 200 if ready else 503, headers, "application/json")

    async def ping(self, request: Request) -> Response:
        return json_answer({})

    async def version(self, request: Request) -> Response:
        return json_answer({"version": __version__})

    async def status(self, request: Request) -> Response:
        return json_answer(await status(self._exchange.gateway, request.state.account))

    async def openapi(self, request: Request) -> Response:
        if self._written is None:
            self._written = orjson.dumps(self._document())
        return Response(self._written, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        # The page holds a key: nothing but its own script may run in it, and it may talk to this server only.
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
        headers = {
            "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return Response(PAGE.replace("NONCE", nonce), headers=headers, media_type="text/html")
