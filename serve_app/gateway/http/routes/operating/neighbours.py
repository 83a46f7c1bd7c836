"""Routes between clusters: how busy this one is, requests that others pass here, and what the operator sees of that."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import OperatorOnly, as_api_error
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.bodies import read_body
from serve_app.gateway.http.exchange import READ, RUN, Endpoint, Exchange, json_answer, log
from serve_app.gateway.http.in_turns import InTurns
from serve_app.gateway.http.streams import EventStream, Primed
from serve_app.gateway.neighbours.receiving import Receiving
from serve_app.wire.neighbours import ALIVE, MEDIA_TYPE, PassedTokens, PassFailed, frame

_TAG = "Server"
_BYTES = {"type": "string", "format": "binary"}
# Prompts of a million tokens, and what is sent beside them.
MAX_BODY = 8 << 20
# A stream that has no token to show says so often that it is alive.
ALIVE_EVERY_S = 4.0


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = NeighbourRoutes(exchange)
    seen = Operation("Other clusters that requests are passed to or come from", _TAG)
    offers = Operation("For other clusters: which models can be served now, and how soon", _TAG, _BYTES,
                       query={"gateway": {"type": "string"}}, media_type=MEDIA_TYPE)  # fmt: skip
    passed = Operation("For other clusters: a request that is passed here", _TAG, _BYTES, _BYTES, "(a message)",
                       media_type=MEDIA_TYPE, body_type=MEDIA_TYPE)  # fmt: skip
    return [
        Endpoint("GET", "/v1/neighbours", routes.seen, seen, scopes=READ),
        Endpoint("GET", "/v1/neighbours/offers", routes.offers, offers, scopes=RUN),
        Endpoint("POST", "/v1/neighbours/pass", routes.passed, passed, scopes=RUN, keyed=False),
    ]


class NeighbourRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._receiving = Receiving(exchange.gateway)
        self._large = InTurns()

    async def seen(self, request: Request) -> Response:
        operator = self._exchange.gateway.settings.account
        if request.state.account != operator:
            raise OperatorOnly("see other clusters", operator)
        return json_answer(self._exchange.gateway.tally.neighbours.shown())

    async def offers(self, request: Request) -> Response:
        caller = request.state.caller
        self._receiving.check(caller)
        asker = request.query_params.get("gateway", "")
        return Response((await self._receiving.offers(caller, asker, time.monotonic())).encode(), media_type=MEDIA_TYPE)

    async def passed(self, request: Request) -> Response:
        caller = request.state.caller
        self._receiving.check(caller)
        body = await read_body(request, MAX_BODY, self._large, frozenset({"bytes"}))
        model, call = await self._receiving.begin(caller, body.data or b"")
        # An error before the first token becomes an HTTP status.
        tokens: Any = await Primed.of(self._receiving.tokens(model, call, caller))  # type: ignore[arg-type]
        return EventStream(_frames(tokens), tokens, every_s=ALIVE_EVERY_S, say=lambda: ALIVE, media_type=MEDIA_TYPE)


async def _frames(tokens: AsyncIterator[PassedTokens]) -> AsyncIterator[bytes]:
    try:
        async for one in tokens:
            yield frame(one)
    except Exception as error:
        shown = as_api_error(error)
        if shown is not error:
            log.error("a passed request failed", exc_info=error)
        yield frame(PassFailed(shown.message))
