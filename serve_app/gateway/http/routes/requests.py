"""Routes about single requests: the path that one took, its stream once more, and its end."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import InvalidInput
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.exchange import ACCOUNT, READ, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.streams import EventStream

PREFIXES = ("/v1", ACCOUNT + "/ai")
_TAG = "Requests"
_AFTER = {"after": {"type": "integer", "minimum": 0}}
TRACE = Operation("The path that one of your requests took", _TAG)
STREAM = Operation(
    "A resumable stream once more, from where a client lost it",
    _TAG,
    {"type": "string"},
    query=_AFTER,
    media_type="text/event-stream",
)
CANCEL = Operation("End a resumable request", _TAG)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = RequestRoutes(exchange)
    found = []
    for prefix in PREFIXES:
        one = prefix + "/requests/{id}"
        found += [
            Endpoint("GET", one, routes.trace, TRACE, scopes=READ),
            Endpoint("GET", one + "/stream", routes.stream, STREAM, scopes=USE),
            Endpoint("POST", one + "/cancel", routes.cancel, CANCEL),
            Endpoint("DELETE", one, routes.cancel, CANCEL),
        ]
    return found


class RequestRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def trace(self, request: Request) -> Response:
        gateway, wanted = self._exchange.gateway, request.path_params["id"]
        return json_answer(await gateway.state.traces.get(request.state.account, wanted))

    async def stream(self, request: Request) -> Response:
        return await replay(self._exchange, request, request.path_params["id"], seen(request))

    async def cancel(self, request: Request) -> Response:
        wanted = request.path_params["id"]
        status = await self._exchange.gateway.streams.cancel(request.state.account, wanted)
        return json_answer({"id": wanted, "status": status})


def seen(request: Request, name: str = "after", nothing: int = 0) -> int:
    """The last frame that the client has: from the query, or from what browsers send; ``nothing`` for none."""
    given = request.query_params.get(name, request.headers.get("last-event-id", "")).strip()
    if not given:
        return nothing
    if not (given.isascii() and given.isdigit() and len(given) <= 15):
        raise InvalidInput(f"{name} (or Last-Event-ID) must be the id of a frame, a whole number.", param=name)
    return int(given)


async def replay(exchange: Exchange, request: Request, stream_id: str, after: int) -> Response:
    """A stream beyond its first ``after`` frames. Raises `NotFound`, `Gone` and `StoreAway`."""
    reading = await exchange.gateway.streams.frames(request.state.account, stream_id, after)
    return EventStream(reading, reading)
