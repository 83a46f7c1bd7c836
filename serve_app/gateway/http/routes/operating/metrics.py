"""Routes of what gateways do: live, and by the minute and the hour."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import AccountForbidden, InvalidInput, OperatorOnly
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.history import MAX_POINTS, HistoryRequest, usual_step
from serve_app.gateway.http.auth import is_operator
from serve_app.gateway.http.exchange import READ, Endpoint, Exchange, json_answer
from serve_app.gateway.prometheus import CONTENT_TYPE
from serve_app.state.kept.history import MINUTE_S
from serve_app.state.spending.usage import moment

TAG = "Metrics"
_TEXT = {"type": "string"}
_QUERY: dict[str, Any] = {
    "since": _TEXT,
    "until": _TEXT,
    "step": {"type": "integer", "minimum": MINUTE_S, "multipleOf": MINUTE_S},
    "group_by": {"enum": ["model", "account"]},
    "model": _TEXT,
    "account": _TEXT,
}
DAY_S = 86_400


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes = MetricRoutes(exchange)
    history = Operation("Requests, tokens, latencies and costs over time", TAG, query=_QUERY)
    now = Operation("The last ten seconds of all gateways", TAG, query={"account": _TEXT})
    page = Operation("Metrics of the node, as Prometheus reads them", TAG, _TEXT, media_type="text/plain")
    return [
        Endpoint("GET", "/v1/metrics/history", routes.history, history, scopes=READ),
        Endpoint("GET", "/v1/metrics/now", routes.now, now, scopes=READ),
        Endpoint("GET", "/metrics", routes.prometheus, page, scopes=READ, locally=True),
    ]


class MetricRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def history(self, request: Request) -> Response:
        asked = self._asked(request)
        points = await self._exchange.gateway.history.read(asked)
        return json_answer({"since": asked.since, "until": asked.until, "step": asked.step, "result": points})

    async def now(self, request: Request) -> Response:
        account = seen_account(self._exchange, request)
        return json_answer({"time": time.time(), **await self._exchange.gateway.history.now(account)})

    async def prometheus(self, request: Request) -> Response:
        gateway = self._exchange.gateway
        operator = gateway.settings.account
        if getattr(request.state, "account", operator) != operator:
            # They are of all accounts together.
            raise OperatorOnly("read metrics", operator)
        return Response(await gateway.exposition(), headers={"Content-Type": CONTENT_TYPE})

    def _asked(self, request: Request) -> HistoryRequest:
        given, now = request.query_params, time.time()
        until, since = _when(given.get("until"), "until", now, int(now) + 1), _when(given.get("since"), "since", now)
        if since is None:
            since = until - DAY_S
        by = given.get("group_by", "")
        if by not in ("", "model", "account"):
            raise InvalidInput("group_by must be model or account.", param="group_by")
        step = given.get("step", "")
        number = int(step) if step.isascii() and step.isdigit() and len(step) < 10 else 0
        if step and (not number or number % MINUTE_S):
            raise InvalidInput(f"step must be a multiple of {MINUTE_S}, in seconds.", param="step")
        seconds = number or usual_step(since, until, now)
        if since >= until or (until - since) / seconds > MAX_POINTS:
            raise InvalidInput(f"since must lie before until, by {MAX_POINTS} steps at most.", param="since")
        model = given.get("model") or None
        return HistoryRequest(since, until, seconds, seen_account(self._exchange, request), model, by)


def seen_account(exchange: Exchange, request: Request) -> str | None:
    """Whose figures the request is for: its own account's; an operator's for all (None), or for the one it names.
    Raises `AccountForbidden`.
    """
    caller, wanted = request.state.caller, request.query_params.get("account")
    if is_operator(caller, exchange.gateway.settings.account):
        return wanted or None
    if wanted not in (None, "", caller.account):
        raise AccountForbidden(str(wanted))
    return caller.account


def _when(text: str | None, name: str, now: float, otherwise: int | None = None) -> Any:
    if not text:
        return otherwise
    try:
        return moment(text, now)
    except ValueError as error:
        raise InvalidInput(f"{name}: {error}", param=name) from None
