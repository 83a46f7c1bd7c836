"""Routes of models by hand, for the operator: records that are added, models that are started, stopped and scaled."""

from __future__ import annotations

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.errors import BadChange, OperatorOnly
from serve_app.api.schema import accounts as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.gateway.http import request_id
from serve_app.gateway.http.auth import is_operator
from serve_app.gateway.http.exchange import ACCOUNT, ADMIN, Endpoint, Exchange, json_answer
from serve_app.gateway.operate import ACTIONS, SHARE, Action
from serve_app.state.callers.audit import Actor

TAG = "Models by hand"
MOST_REPLICAS = 1000
MAX_RECORD = 64 * 1024
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MOST_REPLICAS}
_ACTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "model": {"type": "string", "maxLength": 200},
        "action": {"enum": [*ACTIONS, SHARE]},
        "stage": {"type": "string", "maxLength": 60},
        "replicas": {**_COUNT, "minimum": 1},
        "min_replicas": _COUNT,
        "max_replicas": {**_COUNT, "minimum": 1},
        "canary": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {
                        "model": {"type": "string", "maxLength": 200},
                        "percent": {"type": "number", "minimum": 0, "maximum": 100},
                    },
                    "required": ["model", "percent"],
                },
            ]
        },
    },
    "required": ["model", "action"],
}
_RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "record": {"type": "string", "minLength": 1, "maxLength": MAX_RECORD},
        "check": {"type": "boolean"},
    },
    "required": ["record"],
}
_EXAMPLE = {"model": "@cf/pico/pico-instruct", "action": "scale", "stage": "decode", "replicas": 2}
_YAML = """\
id: "@cf/me/qwen2.5-0.5b"
task: text-generation
description: Qwen2.5 0.5B Instruct.
created_at: "2024-09-19"
weights: {repo: Qwen/Qwen2.5-0.5B-Instruct, revision: main}
properties: {context_window: 32768}
serving:
  gpu:
    decode: {num_gpus: 1}
"""


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes, models = ModelRoutes(exchange), ACCOUNT + "/ai/models"
    one = schemas.object_answer()

    def operator(method: str, path: str, handler: Any, about: Operation) -> Endpoint:
        return Endpoint(method, models + path, handler, about, scopes=ADMIN)

    listing = Operation("Every record, whether or not its model runs", TAG, schemas.list_answer())
    act = Operation(
        "Start, stop or scale a model, or send a share of its requests to another", TAG, one, _ACTION, _EXAMPLE
    )
    add = Operation("Add a record, or only check it", TAG, one, _RECORD, {"record": _YAML, "check": True})
    return [
        operator("GET", "/records", routes.list, listing),
        operator("POST", "/records", routes.add, add),
        operator(
            "DELETE", "/records/{model:path}", routes.forget, Operation("Remove a record that was added", TAG, one)
        ),
        operator("POST", "/actions", routes.act, act),
    ]


class ModelRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def list(self, request: Request) -> Response:
        self._operator(request, "see records of models")
        return json_answer(success(self._exchange.gateway.by_hand.listed()))

    async def add(self, request: Request) -> Response:
        self._operator(request, "add models")
        body = await self._exchange.body(request)
        text, check = body.get("record"), body.get("check", False)
        if not isinstance(text, str) or not text.strip():
            raise BadChange("record is the YAML text of a record; CONTRIBUTING.md shows one.", param="record")
        if len(text) > MAX_RECORD:
            raise BadChange(f"record has {len(text)} characters; {MAX_RECORD} are the most.", param="record")
        if not isinstance(check, bool):
            raise BadChange("check is true or false.", param="check")
        record = await self._exchange.gateway.by_hand.add(text, check=check, by=_by(request))
        told = {"model": record.id, "task": record.task, "profiles": list(record.serving), "added": not check}
        return json_answer(success(told))

    async def forget(self, request: Request) -> Response:
        self._operator(request, "remove models")
        model = request.path_params["model"]
        await self._exchange.gateway.by_hand.forget(model, _by(request))
        return json_answer(success({"model": model}))

    async def act(self, request: Request) -> Response:
        self._operator(request, "start, stop and scale models")
        body = await self._exchange.body(request)
        model, action = body.get("model"), body.get("action")
        if not isinstance(model, str) or not model:
            raise BadChange("model is the id of a model, such as @cf/pico/pico-instruct.", param="model")
        if action not in (*ACTIONS, SHARE):
            raise BadChange(f"action is one of {', '.join((*ACTIONS, SHARE))}.", param="action")
        by_hand = self._exchange.gateway.by_hand
        if action == SHARE:
            await by_hand.share(model, self._canary(body), _by(request))
        else:
            bounds = self._bounds(model, body) if action == "scale" else {}
            await by_hand.act(model, cast(Action, action), bounds, _by(request))
        shown = next((one for one in by_hand.listed() if one["model"] == model), {"model": model})
        return json_answer(success({**shown, "action": action}))

    def _canary(self, body: dict[str, Any]) -> dict[str, Any] | None:
        given = body.get("canary", False)
        if given is not None and not isinstance(given, dict):
            raise BadChange("canary is an object with model and percent, or null to end it.", param="canary")
        return given

    def _bounds(self, model: str, body: dict[str, Any]) -> dict[str, tuple[int, int]]:
        """By stage; what is not said of one stays."""
        served = self._exchange.gateway.models.started.get(model)
        stage = body.get("stage", "" if served is None else served.first_stage)
        if not isinstance(stage, str) or (served is not None and stage not in served.profile.stages):
            listed = "" if served is None else ", ".join(served.profile.stages)
            raise BadChange(f"stage is one of the model's: {listed}.", param="stage")
        names = ("replicas", "min_replicas", "max_replicas")
        given = {name: body[name] for name in names if body.get(name) is not None}
        if not given or ("replicas" in given and len(given) > 1):
            raise BadChange("Give replicas, or min_replicas and max_replicas, or one of them.", param="replicas")
        for name, number in given.items():
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST_REPLICAS:
                raise BadChange(f"{name} is a whole number from 0 to {MOST_REPLICAS}.", param=name)
        now = None if served is None else served.profile.stages[stage]
        least = given.get("replicas", given.get("min_replicas", now.min_replicas if now is not None else 1))
        most = given.get("replicas", given.get("max_replicas", now.max_replicas if now is not None else 1))
        return {stage: (least, most)}

    def _operator(self, request: Request, what: str) -> None:
        account = self._exchange.gateway.settings.account
        if not is_operator(request.state.caller, account):
            raise OperatorOnly(what, account)


def _by(request: Request) -> Actor:
    return Actor(request.state.caller.key, "api", request_id.current.get())
