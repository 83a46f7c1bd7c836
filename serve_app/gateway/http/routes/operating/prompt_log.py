"""Routes of prompts and answers that are kept: whether and how long, which the operator says; and what was kept."""

from __future__ import annotations

import math
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import BadChange, NotFound, OperatorOnly
from serve_app.api.schema import accounts as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http import request_id
from serve_app.gateway.http.auth import is_operator
from serve_app.gateway.http.exchange import ACCOUNT, ADMIN, READ, Endpoint, Exchange, json_answer
from serve_app.state.callers.audit import Actor
from serve_app.state.kept.prompt_log import EVERYBODY, MOST_BYTES, MOST_DAYS

_TAG = "Requests"
_RULE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_DAYS},
        "all": {"type": "boolean"},
    },
    "required": ["days"],
}


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes, path = PromptLogRoutes(exchange), ACCOUNT + "/ai/prompt-log"
    one = schemas.object_answer()
    rule = Operation("Whether prompts and answers are kept", _TAG, one)
    keep = Operation("Keep prompts and answers of an account, or of all", _TAG, one, _RULE, {"days": 7})
    forget = Operation("Keep them no more, and delete what was kept", _TAG, one, query={"all": {"enum": ["true"]}})
    return [
        Endpoint("GET", path, routes.rule, rule, scopes=READ, operated=True),
        Endpoint("PUT", path, routes.keep, keep, scopes=ADMIN, operated=True),
        Endpoint("DELETE", path, routes.forget, forget, scopes=ADMIN, operated=True),
        Endpoint("GET", path + "/{id}", routes.get, Operation("A request's prompt and answer", _TAG, one),
                 scopes=ADMIN, operated=True),
        Endpoint("DELETE", path + "/{id}", routes.delete, Operation("Delete a request's prompt and answer", _TAG, one),
                 scopes=ADMIN, operated=True),
    ]  # fmt: skip


class PromptLogRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def rule(self, request: Request) -> Response:
        kept, account = self._exchange.gateway.state.prompts, _account(request)
        days = kept.days(account)
        told = {"enabled": days is not None, "days": days, "all": kept.of_everybody is not None}
        return json_answer(success({**told, "most_bytes": MOST_BYTES}))

    async def keep(self, request: Request) -> Response:
        self._operator(request, "have prompts and answers kept")
        body = await self._exchange.body(request)
        days, everybody = body.get("days"), body.get("all", False)
        if isinstance(days, bool) or not isinstance(days, int | float) or not math.isfinite(days):
            raise BadChange("days is a number: for how many days each is kept.", param="days")
        if not 0 < days <= MOST_DAYS:
            raise BadChange(f"days is above 0 and at most {MOST_DAYS:g}.", param="days")
        if not isinstance(everybody, bool):
            raise BadChange("all is true or false.", param="all")
        state = self._exchange.gateway.state
        whose = EVERYBODY if everybody else _account(request)
        await state.look(state.prompts.store.keep, whose, float(days), _by(request), told=_account(request))
        await state.look(state.prompts.fill)
        return await self.rule(request)

    async def forget(self, request: Request) -> Response:
        self._operator(request, "have prompts and answers kept no more")
        state = self._exchange.gateway.state
        whose = EVERYBODY if request.query_params.get("all") == "true" else _account(request)
        gone = await state.look(state.prompts.store.forget, whose, _by(request), told=_account(request))
        await state.look(state.prompts.fill)
        return json_answer(success({"deleted": gone, "enabled": state.prompts.days(whose) is not None}))

    async def get(self, request: Request) -> Response:
        account, wanted = _account(request), request.path_params["id"]
        return json_answer(success(await self._exchange.gateway.state.prompts.get(account, wanted, time.time())))

    async def delete(self, request: Request) -> Response:
        state = self._exchange.gateway.state
        account, wanted = _account(request), request.path_params["id"]
        if not await state.prompts.delete(account, wanted, _by(request)):
            raise NotFound("Prompt and answer of this request are not kept.", param="id")
        return json_answer(success({"id": wanted}))

    def _operator(self, request: Request, what: str) -> None:
        account = self._exchange.gateway.settings.account
        if not is_operator(request.state.caller, account):
            raise OperatorOnly(what, account)


def _account(request: Request) -> str:
    return request.path_params["account"]


def _by(request: Request) -> Actor:
    return Actor(request.state.caller.key, "api", request_id.current.get())
