"""Routes of the Anthropic dialect."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.anthropic import read as anthropic
from serve_app.api.anthropic import write as anthropic_answers
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai import read as openai
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import GenerateRequest
from serve_app.gateway.http.exchange import Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.prefixes import ANTHROPIC

_TAG = "Anthropic"
_EXAMPLE = {"model": "@cf/pico/pico-instruct", "messages": [{"role": "user", "content": "What does math.sqrt do?"}]}
MESSAGES = Operation(
    "Create a message",
    _TAG,
    schemas.message_output(),
    schemas.messages_input(),
    {**_EXAMPLE, "max_tokens": 64},
    streams=True,
)
COUNT = Operation("Count the tokens of a conversation", _TAG, schemas.count_output(), schemas.count_input(), _EXAMPLE)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in ANTHROPIC for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = AnthropicRoutes(exchange)
    error_body = anthropic_answers.error_body
    return [
        Endpoint("POST", prefix + "/messages", routes.create, MESSAGES, error_body),
        Endpoint("POST", prefix + "/messages/count_tokens", routes.count, COUNT, error_body),
    ]


class AnthropicRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        parsed = with_headers(
            anthropic.parse_messages_request(body, self._exchange.gateway.limits(model)), request.headers
        )
        events, prompt_tokens = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        if parsed.stream:
            waiting = self._exchange.gateway.waiting(model)
            frames = partial(anthropic_answers.stream_message, parsed, prompt_tokens=prompt_tokens)
            return await self._exchange.streamed(request, events, frames, waiting, parsed.resumable_s)
        return json_answer(anthropic_answers.render_message(parsed, [e async for e in events]))

    async def count(self, request: Request) -> Response:
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        parsed = anthropic.parse_count(body, self._exchange.gateway.limits(model))
        count = await self._exchange.gateway.count_tokens(model, parsed, request.state.caller)
        return json_answer(anthropic_answers.render_count(count))
