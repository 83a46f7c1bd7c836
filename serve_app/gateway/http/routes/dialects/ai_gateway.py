"""Paths of Cloudflare's gateway host that clients have built in: `/v1/{account}/{gateway}/workers-ai/...`, `/compat`.

They are other ways to the same answers: there is one gateway here, whatever the path calls it.
"""

from __future__ import annotations

from serve_app.gateway.http.exchange import Endpoint, Exchange
from serve_app.gateway.http.routes.deferred import anthropic_batches as routes_anthropic_batches
from serve_app.gateway.http.routes.deferred import files as routes_files
from serve_app.gateway.http.routes.deferred import openai_batches as routes_openai_batches
from serve_app.gateway.http.routes.dialects import anthropic as routes_anthropic
from serve_app.gateway.http.routes.dialects import conversations as routes_conversations
from serve_app.gateway.http.routes.dialects import openai as routes_openai
from serve_app.gateway.http.routes.dialects import responses as routes_responses
from serve_app.gateway.http.routes.dialects.native import NativeRoutes, run_operation

GATEWAY = "/v1/{account}/{gateway}"


def endpoints(exchange: Exchange) -> list[Endpoint]:
    native, run = NativeRoutes(exchange), run_operation()
    provider = GATEWAY + "/workers-ai"
    return [
        *routes_openai.under(exchange, provider + "/v1"),
        *routes_responses.under(exchange, provider + "/v1"),
        *routes_conversations.under(exchange, provider + "/v1"),
        *routes_anthropic.under(exchange, provider + "/v1"),
        *routes_files.under(exchange, provider + "/v1"),
        *routes_openai_batches.under(exchange, provider + "/v1"),
        *routes_anthropic_batches.under(exchange, provider + "/v1"),
        *routes_files.under(exchange, GATEWAY + "/compat"),
        *routes_openai_batches.under(exchange, GATEWAY + "/compat"),
        *routes_openai.under(exchange, GATEWAY + "/compat"),
        Endpoint("POST", provider + "/run/{model:path}", native.run, run),
        # Last, because it takes whatever the others left.
        Endpoint("POST", provider + "/{model:path}", native.run, run),
    ]
