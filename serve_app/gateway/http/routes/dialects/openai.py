"""Routes of the OpenAI dialect, where clients look for them: under the account, at /v1, on the gateway host's paths."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.collect import merge
from serve_app.api.envelopes import openai_body
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai import read as openai
from serve_app.api.openai import write as openai_answers
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import EmbedRequest, GenerateRequest
from serve_app.gateway.http.exchange import USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.tasks.estimate import Estimated

_CHAT_MODEL, _EMBED_MODEL = "@cf/pico/pico-instruct", "@cf/sentence-transformers/all-minilm-l6-v2"
_QUESTION = [{"role": "user", "content": "What does math.sqrt do?"}]
_TAG = "OpenAI"
CHAT = Operation(
    "Chat completion",
    _TAG,
    schemas.openai_answer("chat.completion"),
    schemas.chat_input(),
    {"model": _CHAT_MODEL, "messages": _QUESTION},
    streams=True,
)
COMPLETION = Operation(
    "Text completion, without chat template",
    _TAG,
    schemas.openai_answer("text_completion"),
    schemas.completion_input(),
    {"model": _CHAT_MODEL, "prompt": "import os\n", "max_tokens": 16},
    streams=True,
)
EMBEDDINGS = Operation(
    "Embeddings",
    _TAG,
    schemas.openai_list(),
    schemas.embeddings_input(),
    {"model": _EMBED_MODEL, "input": ["one", "two"]},
)
MODELS = Operation("The models", _TAG, schemas.openai_list(schemas.openai_model()))
MODEL = Operation("One model", _TAG, schemas.openai_model())


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in OPENAI for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = OpenAIRoutes(exchange)
    return [
        Endpoint("POST", prefix + "/chat/completions", routes.chat, CHAT, openai_body),
        Endpoint("POST", prefix + "/completions", routes.completions, COMPLETION, openai_body),
        Endpoint("POST", prefix + "/embeddings", routes.embeddings, EMBEDDINGS, openai_body),
        Endpoint("GET", prefix + "/models", routes.models, MODELS, openai_body, USE),
        Endpoint("GET", prefix + "/models/{model:path}", routes.model, MODEL, openai_body, USE),
    ]


class OpenAIRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def chat(self, request: Request) -> Response:
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        parsed = with_headers(openai.parse_chat(body, self._exchange.gateway.limits(model)), request.headers)
        events = await self._exchange.gateway.generate(model, parsed, request.state.caller)
        if parsed.stream:
            waiting = self._exchange.gateway.waiting(model)
            frames = partial(openai_answers.stream_chat, parsed)
            return await self._exchange.streamed(request, events, frames, waiting, parsed.resumable_s)
        return json_answer(openai_answers.render_chat(parsed, [e async for e in events]))

    async def completions(self, request: Request) -> Response:
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        parsed = [
            with_headers(one, request.headers)
            for one in openai.parse_completions(body, self._exchange.gateway.limits(model))
        ]
        caller = request.state.caller
        if parsed[0].estimate:
            raise Estimated(await self._exchange.gateway.estimate(model, parsed, caller))
        streams = [await self._exchange.gateway.generate(model, one, caller) for one in parsed]
        events = merge(streams, choices_each=parsed[0].n)
        if parsed[0].stream:
            waiting = self._exchange.gateway.waiting(model)
            frames = partial(openai_answers.stream_completion, parsed)
            return await self._exchange.streamed(request, events, frames, waiting, parsed[0].resumable_s)
        return json_answer(openai_answers.render_completion(parsed, [e async for e in events]))

    async def embeddings(self, request: Request) -> Response:
        name, body = openai.model_of(await self._exchange.body(request, EmbedRequest))
        model = await self._exchange.model(request, name, EmbedRequest)
        parsed = with_headers(openai.parse_embeddings(body), request.headers)
        reading, usage = await self._exchange.gateway.perform(model, parsed, request.state.caller)
        return json_answer(openai_answers.render_embeddings(parsed, reading.dense, usage))

    async def models(self, request: Request) -> Response:
        return json_answer(await self._exchange.gateway.listed.openai_models(request.state.account))

    async def model(self, request: Request) -> Response:
        return json_answer(
            await self._exchange.gateway.listed.openai_model(request.state.account, request.path_params["model"])
        )
