"""The HTTP application of one gateway replica: the list of dialects, and what is not routed."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from serve_app import __version__
from serve_app.api.anthropic.write import error_body as anthropic_body
from serve_app.api.envelopes import envelope, openai_body
from serve_app.api.errors import MethodNotAllowed, NoRoute
from serve_app.api.ollama.write import error_body as ollama_body
from serve_app.api.schema.openapi import document
from serve_app.gateway.core import Gateway
from serve_app.gateway.http import request_id
from serve_app.gateway.http.cross_origin import cross_origin
from serve_app.gateway.http.exchange import Endpoint, ErrorBody, Exchange, error_answer, log
from serve_app.gateway.http.old_clients import Lengths
from serve_app.gateway.http.resumable import runs_again
from serve_app.gateway.http.routes.deferred import anthropic_batches as routes_anthropic_batches
from serve_app.gateway.http.routes.deferred import batch_lines as routes_batch_lines
from serve_app.gateway.http.routes.deferred import batches as routes_batches
from serve_app.gateway.http.routes.deferred import event_subscriptions as routes_event_subscriptions
from serve_app.gateway.http.routes.deferred import files as routes_files
from serve_app.gateway.http.routes.deferred import openai_batches as routes_openai_batches
from serve_app.gateway.http.routes.deferred import queues as routes_queues
from serve_app.gateway.http.routes.deferred import webhooks as routes_webhooks
from serve_app.gateway.http.routes.dialects import ai_gateway as routes_ai_gateway
from serve_app.gateway.http.routes.dialects import anthropic as routes_anthropic
from serve_app.gateway.http.routes.dialects import audio as routes_audio
from serve_app.gateway.http.routes.dialects import conversations as routes_conversations
from serve_app.gateway.http.routes.dialects import documents as routes_documents
from serve_app.gateway.http.routes.dialects import drawing as routes_drawing
from serve_app.gateway.http.routes.dialects import estimate as routes_estimate
from serve_app.gateway.http.routes.dialects import native as routes_native
from serve_app.gateway.http.routes.dialects import ollama as routes_ollama
from serve_app.gateway.http.routes.dialects import openai as routes_openai
from serve_app.gateway.http.routes.dialects import realtime as routes_realtime
from serve_app.gateway.http.routes.dialects import rerank as routes_rerank
from serve_app.gateway.http.routes.dialects import responses as routes_responses
from serve_app.gateway.http.routes.dialects import tokens as routes_tokens
from serve_app.gateway.http.routes.operating import about as routes_about
from serve_app.gateway.http.routes.operating import account_tokens as routes_account_tokens
from serve_app.gateway.http.routes.operating import accounts as routes_accounts
from serve_app.gateway.http.routes.operating import cluster as routes_cluster
from serve_app.gateway.http.routes.operating import dashboard as routes_dashboard
from serve_app.gateway.http.routes.operating import finetunes as routes_finetunes
from serve_app.gateway.http.routes.operating import metrics as routes_metrics
from serve_app.gateway.http.routes.operating import models as routes_models
from serve_app.gateway.http.routes.operating import neighbours as routes_neighbours
from serve_app.gateway.http.routes.operating import prompt_log as routes_prompt_log
from serve_app.gateway.http.routes.operating import requests as routes_requests
from serve_app.gateway.http.routes.operating import usage as routes_usage
from serve_app.gateway.tracing.export import Tracing

# What runs models: a dialect is one line here.
DIALECTS = (
    routes_native.endpoints,
    routes_openai.endpoints,
    routes_responses.endpoints,
    routes_anthropic.endpoints,
    routes_rerank.endpoints,
    routes_ollama.endpoints,
    routes_audio.endpoints,
    routes_drawing.endpoints,
)
OTHERS = (
    routes_finetunes.endpoints,
    routes_documents.endpoints,
    routes_files.endpoints,
    routes_openai_batches.endpoints,
    routes_anthropic_batches.endpoints,
    routes_batches.endpoints,
    routes_batch_lines.endpoints,
    routes_conversations.endpoints,
    routes_requests.endpoints,
    routes_tokens.endpoints,
    routes_accounts.endpoints,
    routes_account_tokens.endpoints,
    routes_usage.endpoints,
    routes_webhooks.endpoints,
    routes_queues.endpoints,
    routes_event_subscriptions.endpoints,
    routes_metrics.endpoints,
    routes_cluster.endpoints,
    routes_neighbours.endpoints,
    routes_models.endpoints,
    routes_prompt_log.endpoints,
    routes_dashboard.endpoints,
)
# The gateway host's routes fit much, and the first route that fits answers.
LAST = (routes_ai_gateway.endpoints,)


def endpoints(gateway: Gateway) -> list[Endpoint]:
    """Every route there is. ``gateway`` is not touched before a request comes."""
    exchange = Exchange(gateway)

    def describe() -> dict[str, Any]:
        described = ((e.method, e.path, e.about, e.scopes is not None) for e in listed)
        return document(described, __version__, gateway.settings.account)

    listed = routes_about.endpoints(exchange, describe)
    dialects = [endpoint for dialect in DIALECTS for endpoint in dialect(exchange)]
    listed += [*dialects, *routes_estimate.endpoints(exchange, dialects)]
    listed += [endpoint for routes in (*OTHERS, *LAST) for endpoint in routes(exchange)]
    return listed


def build_http(gateway: Gateway) -> Starlette:
    """The ASGI application of one gateway replica."""
    exchange = Exchange(gateway)
    listed = endpoints(gateway)
    routes = [Route(e.path, exchange.guarded(e), methods=[e.method]) for e in listed]
    origins: tuple[str, ...] = ()
    tracing = Tracing()
    if gateway is not None:  # as where only the routes are looked at
        origins, tracing = gateway.settings.cors_origins, gateway.tracing
        gateway.streams.again = runs_again(routes, [e.handler for e in listed])
    request_id.tag(log)

    async def not_routed(request: Request, error: Exception) -> Response:
        """404 and 405 in the words of the API."""
        assert isinstance(error, HTTPException)
        if error.status_code != 405:
            return error_answer(NoRoute(request.method, request.url.path), _dialect(request.url.path))
        fitting = [i for i, route in enumerate(routes) if route.matches(request.scope)[0] != Match.NONE]
        allowed = ", ".join(sorted({method for i in fitting for method in routes[i].methods or ()}))
        return error_answer(MethodNotAllowed(request.method, allowed), listed[fitting[0]].error_body)

    app = Starlette(
        routes=[*routes, *routes_realtime.routes(exchange)],
        middleware=[
            Middleware(request_id.RequestId, tracing=tracing),
            *cross_origin(origins, _dialect),
            Middleware(Lengths),
        ],
        exception_handlers={HTTPException: not_routed},
    )
    # A redirect to a path with or without a slash at its end would be an answer that no client expects.
    app.router.redirect_slashes = False
    return app


def _dialect(path: str) -> ErrorBody:
    """The words for a path that no route has: those of the dialect it looks like."""
    if "/messages" in path:
        return anthropic_body
    if path.startswith("/api/"):
        return ollama_body
    return openai_body if "/v1/" in path else envelope
