"""Routes of the OpenAI Responses dialect."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.errors import Gone, NotFound, openai_body
from serve_app.api.fields.asked import with_headers
from serve_app.api.openai import read as openai
from serve_app.api.responses import read as responses
from serve_app.api.responses import write as responses_answers
from serve_app.api.responses.compact import render_compaction, to_summarise
from serve_app.api.responses.items import resolve_references
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import GenerateRequest
from serve_app.gateway.http.exchange import USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.resumable import launch
from serve_app.gateway.http.routes.openai import PREFIXES
from serve_app.gateway.http.routes.requests import replay, seen
from serve_app.gateway.resume.log import split
from serve_app.state.streams import CANCELLING, RUNNING

_TAG = "OpenAI Responses"
CREATE = Operation(
    "Create a response",
    _TAG,
    schemas.response_output(),
    schemas.responses_input(),
    {"model": "@cf/pico/pico-instruct", "input": "What does math.sqrt do?"},
    streams=True,
)
COUNT = Operation(
    "Count the tokens of a response's input",
    _TAG,
    schemas.input_tokens_output(),
    schemas.responses_input(),
    CREATE.example,
)
COMPACT = Operation(
    "Make a conversation short", _TAG, schemas.compaction_output(), schemas.compact_input(), CREATE.example
)
GET = Operation(
    "A stored response",
    _TAG,
    schemas.response_output(),
    query={"stream": {"type": "string", "enum": ["true", "false"]}, "starting_after": {"type": "integer"}},
    streams=True,
)
ITEMS = Operation("What a stored response was an answer to", _TAG, schemas.openai_list())
CANCEL = Operation("End a response that is made in the background", _TAG, schemas.response_output())
DELETE = Operation("Forget a stored response", _TAG)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in PREFIXES for endpoint in under(exchange, prefix)]


def under(exchange: Exchange, prefix: str) -> list[Endpoint]:
    """The dialect's routes below ``prefix``."""
    routes = ResponsesRoutes(exchange)
    one = prefix + "/responses/{response_id}"
    return [
        Endpoint("POST", prefix + "/responses", routes.create, CREATE, openai_body),
        Endpoint("POST", prefix + "/responses/input_tokens", routes.count, COUNT, openai_body),
        Endpoint("POST", prefix + "/responses/compact", routes.compact, COMPACT, openai_body),
        Endpoint("GET", one, routes.get, GET, openai_body, USE),
        Endpoint("GET", one + "/input_items", routes.input_items, ITEMS, openai_body, USE),
        Endpoint("POST", one + "/cancel", routes.cancel, CANCEL, openai_body),
        Endpoint("DELETE", one, routes.delete, DELETE, openai_body),
    ]


class ResponsesRoutes:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        gateway, account = self._exchange.gateway, request.state.account
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        body = await resolve_references(body, lambda named: gateway.state.responses.get(account, named))
        parsed = responses.parse_responses(body, gateway.limits(model))
        parsed.generate = with_headers(parsed.generate, request.headers)
        parsed.generate.messages = parsed.messages(await gateway.state.responses.conversation(account, parsed.previous))
        # What is made in the background is shown as it is made, to whoever asks for it.
        asked = replace(parsed.generate, stream=True) if parsed.background else parsed.generate
        events = await gateway.generate(model, asked, request.state.caller)

        async def keep(response: dict[str, Any]) -> None:
            if parsed.store:
                turn = [*parsed.turn, *responses_answers.as_messages(response)]
                await gateway.state.responses.put(account, response, turn)

        frames = partial(responses_answers.stream_response, parsed, keep=keep)
        if parsed.background:
            stream_id = await launch(gateway.streams, request, events, frames, None)
            if parsed.generate.stream:
                return await replay(self._exchange, request, stream_id, 0)
            return json_answer(responses_answers.render_queued(parsed))
        if parsed.generate.stream:
            resumable_s = parsed.generate.resumable_s
            return await self._exchange.streamed(request, events, frames, gateway.waiting(model), resumable_s)
        response = responses_answers.render_response(parsed, [e async for e in events])
        await keep(response)
        return json_answer(response)

    async def count(self, request: Request) -> Response:
        gateway, account = self._exchange.gateway, request.state.account
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        body = await resolve_references(body, lambda named: gateway.state.responses.get(account, named))
        parsed = responses.parse_responses(body, gateway.limits(model))
        before = await gateway.state.responses.conversation(account, parsed.previous)
        parsed.generate.messages = parsed.messages(before)
        count = await gateway.count_tokens(model, parsed.generate)
        return json_answer({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, request: Request) -> Response:
        gateway, account = self._exchange.gateway, request.state.account
        name, body = openai.model_of(await self._exchange.body(request, GenerateRequest))
        model = await self._exchange.model(request, name, GenerateRequest)
        body = await resolve_references(body, lambda named: gateway.state.responses.get(account, named))
        if body.get("input") is None and body.get("previous_response_id") is not None:
            body = {**body, "input": []}
        parsed = responses.parse_responses({**body, "stream": False}, gateway.limits(model), may_be_empty=True)
        messages = parsed.messages(await gateway.state.responses.conversation(account, parsed.previous))
        parsed.generate.messages = to_summarise(messages)
        parsed.generate.tools = None
        events = await gateway.generate(model, with_headers(parsed.generate, request.headers), request.state.caller)
        return json_answer(render_compaction(messages, [e async for e in events]))

    async def get(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            # Events are numbered from 0, and frames from 1.
            after = seen(request, "starting_after", -1) + 1
            return await replay(self._exchange, request, _stream_of(response_id), after)
        try:
            return json_answer(await self._exchange.gateway.state.responses.get(request.state.account, response_id))
        except NotFound as unknown:
            try:
                return json_answer(await self._unfinished(request.state.account, response_id))
            except (NotFound, Gone):
                raise unknown from None

    async def _unfinished(self, account: str, response_id: str) -> dict[str, Any]:
        """The response as far as its stream tells, which is its beginning or its end."""
        streams, stream_id = self._exchange.gateway.streams, _stream_of(response_id)
        running = await streams.status(account, stream_id) in (RUNNING, CANCELLING)
        shown = None
        async with aclosing(await streams.frames(account, stream_id, 0)) as reading:
            async for frames in reading:
                for frame in split(frames):
                    shown = responses_answers.shown_in(frame) or shown
                if running and shown is not None:
                    break
        if shown is None:
            raise NotFound(f"No response {response_id[:64]} is stored here.")
        return shown

    async def cancel(self, request: Request) -> Response:
        response_id, account = request.path_params["response_id"], request.state.account
        await self._exchange.gateway.streams.cancel(account, _stream_of(response_id))
        return json_answer(await self._exchange.gateway.state.responses.get(account, response_id))

    async def input_items(self, request: Request) -> Response:
        response_id, account = request.path_params["response_id"], request.state.account
        store = self._exchange.gateway.state.responses
        answered = responses_answers.as_messages(await store.get(account, response_id))
        turns = await store.conversation(account, response_id)
        asked = turns[: len(turns) - len(answered)]
        return json_answer(responses_answers.render_input_items(asked, response_id))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._exchange.gateway.state.responses.delete(request.state.account, response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})


def _stream_of(response_id: str) -> str:
    """A response that is made in the background is a request's stream, and has its id."""
    return response_id.removeprefix("resp_")
