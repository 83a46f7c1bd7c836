"""The HTTP surface: routes, and for each the same steps: authenticate, read, translate, run, translate back."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.api import errors, openai, openai_answers, sse, workers_ai, workers_ai_answers
from serve_app.api.body import parse_body, read_bounded
from serve_app.api.collect import merge
from serve_app.api.types import Event
from serve_app.gateway.auth import authenticate
from serve_app.gateway.core import Gateway

log = logging.getLogger("ray.serve")

Handler = Callable[[Request], Awaitable[Response]]
ACCOUNT = "/client/v4/accounts/{account}"


def build_http(gateway: Gateway) -> Starlette:
    """The ASGI application of one gateway replica."""
    routes = Routes(gateway)
    guarded, openai_guarded = routes.guarded, routes.openai_guarded
    listed = [
        Route("/health", routes.health, methods=["GET"]),
        Route(ACCOUNT + "/ai/run/{model:path}", guarded(routes.run), methods=["POST"]),
        Route(ACCOUNT + "/ai/run", guarded(routes.run_generic), methods=["POST"]),
        Route(ACCOUNT + "/ai/models/search", guarded(routes.search), methods=["GET"]),
        Route(ACCOUNT + "/ai/models/schema", guarded(routes.schema), methods=["GET"]),
    ]
    for prefix in (ACCOUNT + "/ai/v1", "/v1"):
        listed += [
            Route(prefix + "/chat/completions", openai_guarded(routes.chat), methods=["POST"]),
            Route(prefix + "/completions", openai_guarded(routes.completions), methods=["POST"]),
            Route(prefix + "/embeddings", openai_guarded(routes.embeddings), methods=["POST"]),
            Route(prefix + "/models", openai_guarded(routes.models), methods=["GET"]),
            Route(prefix + "/models/{model:path}", openai_guarded(routes.model), methods=["GET"]),
        ]
    listed.append(Route("/v1/status", guarded(routes.status), methods=["GET"]))
    return Starlette(routes=listed, exception_handlers={HTTPException: routes.not_routed})


class Routes:
    """Handlers over one gateway. Each takes a Starlette request that is authenticated already."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    # -- around every handler --------------------------------------------------------------------------------------------

    def guarded(self, handler: Handler) -> Handler:
        return self._guard(handler, openai_errors=False)

    def openai_guarded(self, handler: Handler) -> Handler:
        return self._guard(handler, openai_errors=True)

    def _guard(self, handler: Handler, *, openai_errors: bool) -> Handler:
        async def guarded(request: Request) -> Response:
            request.state.id = request_id = uuid.uuid4().hex
            try:
                account = authenticate(request.headers, self._gateway.settings, request.path_params.get("account"))
                request.state.account = account
                response = await handler(request)
            except ClientDisconnect:
                raise
            except Exception as error:
                response = self._error(error, request_id, openai_errors)
            response.headers["cf-ray"] = request_id
            return response

        return guarded

    def _error(self, error: Exception, request_id: str, openai_errors: bool) -> Response:
        shown = errors.as_api_error(error, request_id)
        if not isinstance(error, errors.ApiError):
            log.error("request %s failed", request_id, exc_info=error)
        status, headers, body = errors.response_parts(shown, openai=openai_errors)
        return Response(body, status, headers)

    async def not_routed(self, request: Request, error: Exception) -> Response:
        """404 and 405 in the words of the API."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            shown: errors.ApiError = errors.MethodNotAllowed(request.method, allowed)
        else:
            shown = errors.NoRoute(request.method, request.url.path)
        return self._error(shown, "", "/v1/" in request.url.path)

    async def _body(self, request: Request, task: str = "") -> dict[str, Any]:
        settings = self._gateway.settings
        # A prompt is bounded by a context window; thousands of texts to embed are an ordinary request.
        limit = settings.max_body_bytes if task == "text-generation" else settings.max_embedding_body_bytes
        raw = await read_bounded(request.stream(), request.headers.get("content-length"), limit=limit)
        return parse_body(raw, limit=limit)

    # -- native dialect --------------------------------------------------------------------------------------------------

    async def run(self, request: Request) -> Response:
        name = request.path_params["model"]
        return await self._run(request, name, await self._body(request, self._gateway.models.task_of(name)))

    async def run_generic(self, request: Request) -> Response:
        name, inputs = workers_ai.parse_run_target(await self._body(request))
        return await self._run(request, name, inputs)

    async def _run(self, request: Request, name: str, body: dict[str, Any]) -> Response:
        queued = request.query_params.get("queueRequest", "").lower() in ("true", "1")
        result = await self._gateway.run(name, body, request.state.account, queue_request=queued)
        if isinstance(result, dict):
            return _json(result)
        parsed, events = result
        primed = await _Primed.of(events)
        return _EventStream(workers_ai_answers.stream_generate(parsed, primed), primed)

    async def search(self, request: Request) -> Response:
        return _json(self._gateway.search(dict(request.query_params)))

    async def schema(self, request: Request) -> Response:
        return _json(errors.success(self._gateway.schema(request.query_params.get("model", ""))))

    # -- OpenAI dialect --------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        name, body = openai.model_of(await self._body(request, "text-generation"))
        model = self._gateway.models.find(name, ("text-generation",))
        parsed = openai.parse_chat(body, model.limits)
        events = await self._gateway.generate(model, parsed, request.state.account)
        if parsed.stream:
            primed = await _Primed.of(events)
            return _EventStream(openai_answers.stream_chat(parsed, primed), primed)
        return _json(openai_answers.render_chat(parsed, [e async for e in events]))

    async def completions(self, request: Request) -> Response:
        name, body = openai.model_of(await self._body(request, "text-generation"))
        model = self._gateway.models.find(name, ("text-generation",))
        parsed = openai.parse_completions(body, model.limits)
        streams = [await self._gateway.generate(model, one, request.state.account) for one in parsed]
        events = merge(streams, choices_each=parsed[0].n)
        if parsed[0].stream:
            primed = await _Primed.of(events)
            return _EventStream(openai_answers.stream_completion(parsed, primed), primed)
        return _json(openai_answers.render_completion(parsed, [e async for e in events]))

    async def embeddings(self, request: Request) -> Response:
        name, body = openai.model_of(await self._body(request))
        model = self._gateway.models.find(name, ("text-embeddings",))
        parsed = openai.parse_embeddings(body)
        vectors, usage = await self._gateway.encoder.embed(model, parsed)
        return _json(openai_answers.render_embeddings(parsed, vectors, usage))

    async def models(self, request: Request) -> Response:
        return _json(self._gateway.openai_models())

    async def model(self, request: Request) -> Response:
        return _json(self._gateway.openai_model(request.path_params["model"]))

    # -- about the server ------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        report = self._gateway.health.report()
        ready = report["status"] == "ready"
        return Response(orjson.dumps(report), 200 if ready else 503, {} if ready else {"Retry-After": "1"}, "application/json")

    async def status(self, request: Request) -> Response:
        return _json(await self._gateway.status())


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


class _Primed:
    """Events whose first one is there already, so that what goes wrong before it still becomes an HTTP status.

    A class and not a generator: closing a generator that was never started would leave ``events`` open, and with them
    the request in the engine, when a client leaves just before the first byte.
    """

    def __init__(self, first: Event | None, events: AsyncIterator[Event]) -> None:
        self._first = first
        self._events = events

    @classmethod
    async def of(cls, events: AsyncIterator[Event]) -> _Primed:
        return cls(await anext(events, None), events)

    def __aiter__(self) -> _Primed:
        return self

    async def __anext__(self) -> Event:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._events)

    async def aclose(self) -> None:
        await openai_answers.close(self._events)


class _EventStream(StreamingResponse):
    """Server-sent events that close the request behind them however they end, also before the first byte."""

    def __init__(self, frames: AsyncIterator[bytes], events: _Primed) -> None:
        super().__init__(sse.with_keep_alive(frames), headers=dict(sse.HEADERS))
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
