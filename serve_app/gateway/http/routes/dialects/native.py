"""Routes of the Workers AI dialect: run, and the catalogue."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import success
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema.openapi import Operation, Schema
from serve_app.api.workers_ai import read as workers_ai
from serve_app.api.workers_ai.batches import batch_key
from serve_app.gateway.http.exchange import ACCOUNT, USE, Endpoint, Exchange, json_answer, written
from serve_app.gateway.http.routes.deferred.queued import MAX_BYTES, poll, queued
from serve_app.tasks.registry import tasks
from serve_app.tasks.task import Answer, Body

_PAGED: dict[str, Schema] = {
    "search": {"type": "string"},
    "page": {"type": "integer", "minimum": 1},
    "per_page": {"type": "integer", "minimum": 1},
}
_FLAG: Schema = {"type": "string", "enum": ["true", "false"]}


def run_operation() -> Operation:
    """What any task of `/ai/run/{model}` takes and answers; GET /ai/models/schema has the model's own."""
    schemas_of = [task.schema() for task in tasks().values()]
    answers = [part for found in schemas_of for part in found["output"].get("oneOf", [found["output"]])]
    first = next(iter(tasks().values())).declaration
    return Operation(
        "Run a model",
        "Workers AI",
        schemas.enveloped({"anyOf": [part for part in answers if part["type"] == "object"]}),
        {"anyOf": [found["input"] for found in schemas_of]},
        first.example,
        {"queueRequest": _FLAG},
        streams=True,
    )


def endpoints(exchange: Exchange) -> list[Endpoint]:
    routes, run = NativeRoutes(exchange), run_operation()
    example = {"model": "@cf/pico/pico-instruct", "input": run.example}
    generic = Operation(
        "Run the model that the body names", "Workers AI", run.answer, schemas.generic_input(), example, streams=True
    )
    models: dict[str, Schema] = {
        **_PAGED,
        "task": {"type": "string"},
        "author": {"type": "string"},
        "source": {"type": "string"},
        "hide_experimental": _FLAG,
        "include_deprecated": _FLAG,
        "format": {"type": "string", "enum": ["openrouter"]},
    }
    listing = schemas.listing({"type": "object"})
    found = {"anyOf": [listing, {"type": "object", "required": ["data"]}]}
    both = schemas.enveloped({"type": "object", "required": ["input", "output"]})
    ai = ACCOUNT + "/ai"
    polling = Operation(
        "How far a batch is, or its answers", "Workers AI", query={"request_id": {"type": "string", "minLength": 32}}
    )
    return [
        Endpoint("POST", ai + "/run/{model:path}", routes.run, run),
        Endpoint("POST", ai + "/run", routes.run_generic, generic),
        Endpoint("GET", ai + "/run/{model:path}", routes.poll, polling, scopes=USE),
        Endpoint(
            "GET",
            ai + "/models/search",
            routes.search,
            Operation("Search models", "Catalogue", found, query=models),
            scopes=USE,
        ),
        Endpoint(
            "GET",
            ai + "/models/schema",
            routes.schema,
            Operation("JSON Schemas of a model", "Catalogue", both, query={"model": {"type": "string"}}),
            scopes=USE,
        ),
        Endpoint(
            "GET",
            ai + "/authors/search",
            routes.authors,
            Operation("Search authors", "Catalogue", listing, query=_PAGED),
            scopes=USE,
        ),
        Endpoint(
            "GET",
            ai + "/tasks/search",
            routes.tasks,
            Operation("Search tasks", "Catalogue", listing, query=_PAGED),
            scopes=USE,
        ),
    ]


class NativeRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def run(self, request: Request) -> Response:
        name = request.path_params["model"]
        return await self._run(request, name, await self._exchange.native_body(request, name, MAX_BYTES))

    async def run_generic(self, request: Request) -> Response:
        name, inputs = workers_ai.parse_run_target(await self._exchange.body(request))
        return await self._run(request, name, Body(inputs))

    async def poll(self, request: Request) -> Response:
        return await poll(self._exchange, request, batch_key(request.query_params.get("request_id")))

    async def _run(self, request: Request, name: str, body: Body) -> Response:
        if (answer := await queued(self._exchange, request, name, body.json)) is not None:
            return answer
        self._exchange.check_size(request, name)
        request.state.asked = body.json
        model = await self._exchange.model(request, name)
        run = self._exchange.gateway.run
        result = await run(name, body, request.state.caller, headers=request.headers, model=model)
        if isinstance(result, Answer):
            return written(result)
        return await self._exchange.streamed(request, result.events, result.frames, result.waiting, result.resumable_s)

    async def search(self, request: Request) -> Response:
        return json_answer(self._exchange.gateway.listed.search(dict(request.query_params)))

    async def schema(self, request: Request) -> Response:
        return json_answer(success(self._exchange.gateway.listed.schema(request.query_params.get("model", ""))))

    async def authors(self, request: Request) -> Response:
        return json_answer(self._exchange.gateway.listed.authors(dict(request.query_params)))

    async def tasks(self, request: Request) -> Response:
        return json_answer(self._exchange.gateway.listed.tasks(dict(request.query_params)))
