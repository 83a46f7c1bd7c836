"""Routes about single requests: the path that one took, its stream once more, and its end."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import InvalidInput
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http.exchange import ACCOUNT, READ, USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.operating.metrics import seen_account
from serve_app.gateway.http.streams import EventStream
from serve_app.state.kept.traces import TraceQuery

PREFIXES = ("/v1", ACCOUNT + "/ai")
MAX_LISTED = 1000
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
_TEXT = {"type": "string"}
LIST = Operation(
    "The last requests",
    _TAG,
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
        "before": {"type": "number", "minimum": 0},
        "model": _TEXT,
        "status": {"enum": ["running", "done", "refused", "failed", "left"]},
        "account": _TEXT,
        "min_ms": {"type": "number", "minimum": 0},
    },
)
CANCEL = Operation("End a resumable request", _TAG)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = RequestRoutes(exchange)
    found = []
    for prefix in PREFIXES:
        one = prefix + "/requests/{id}"
        found += [
            Endpoint("GET", prefix + "/requests", routes.list, LIST, scopes=READ),
            Endpoint("GET", one, routes.trace, TRACE, scopes=READ),
            Endpoint("GET", one + "/stream", routes.stream, STREAM, scopes=USE),
            Endpoint("POST", one + "/cancel", routes.cancel, CANCEL),
            Endpoint("DELETE", one, routes.cancel, CANCEL),
        ]
    return found


class RequestRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def list(self, request: Request) -> Response:
        given = request.query_params
        query = TraceQuery(
            account=request.path_params.get("account") or seen_account(self._exchange, request),
            model=given.get("model") or None,
            status=given.get("status") or None,
            min_ms=_number(given.get("min_ms"), "min_ms"),
            before=_number(given.get("before"), "before"),
            limit=int(min(MAX_LISTED, max(1.0, _number(given.get("limit"), "limit") or 100))),
        )
        found = await self._exchange.gateway.state.traces.list(query)
        more = found[-1]["ended"] if len(found) == query.limit else None
        return json_answer({"result": found, "next": more})

    async def trace(self, request: Request) -> Response:
        gateway, wanted = self._exchange.gateway, request.path_params["id"]
        return json_answer(await gateway.state.traces.get(request.state.account, wanted))

    async def stream(self, request: Request) -> Response:
        return await replay(self._exchange, request, request.path_params["id"], seen(request))

    async def cancel(self, request: Request) -> Response:
        wanted = request.path_params["id"]
        status = await self._exchange.gateway.streams.cancel(request.state.account, wanted)
        return json_answer({"id": wanted, "status": status})


def _number(text: str | None, name: str) -> float | None:
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e15:
        raise InvalidInput(f"{name} must be a number of at least 0.", param=name)
    return found


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
