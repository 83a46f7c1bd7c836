"""Routes of the OpenAI Responses dialect."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.envelopes import openai_body
from serve_app.api.errors import Gone, InvalidInput, NotFound
from serve_app.api.fields.asked import with_headers
from serve_app.api.fields.content import ANY_KIND
from serve_app.api.openai import read as openai
from serve_app.api.responses import read as responses
from serve_app.api.responses import write as responses_answers
from serve_app.api.responses.compact import render_compaction, to_summarise
from serve_app.api.responses.conversation import page_of, parse_page, stored_items
from serve_app.api.responses.items import resolve_references
from serve_app.api.responses.template import parse_reference, with_template
from serve_app.api.schema import conversations as conversation_schemas
from serve_app.api.schema import dialects as schemas
from serve_app.api.schema.openapi import Operation
from serve_app.api.types import GenerateRequest
from serve_app.catalog.prompts import BrokenPrompt
from serve_app.gateway.http.exchange import USE, Endpoint, Exchange, json_answer
from serve_app.gateway.http.resumable import launch
from serve_app.gateway.http.routes.operating.requests import replay, seen
from serve_app.gateway.http.routes.prefixes import OPENAI
from serve_app.gateway.resume.log import split
from serve_app.state.kept.responses import Beginning
from serve_app.state.kept.streams import CANCELLING, RUNNING
from serve_app.tasks.model import ServedModel

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
ITEMS = Operation(
    "What a stored response was an answer to", _TAG, schemas.openai_list(), query=conversation_schemas.page_query()
)
CANCEL = Operation("End a response that is made in the background", _TAG, schemas.response_output())
DELETE = Operation("Forget a stored response", _TAG)


def endpoints(exchange: Exchange) -> list[Endpoint]:
    return [endpoint for prefix in OPENAI for endpoint in under(exchange, prefix)]


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

    async def _read(
        self, request: Request, *, may_be_empty: bool = False
    ) -> tuple[ServedModel, responses.ResponsesRequest, str | None]:
        """The model, the request with all that went before it, and what its chain of responses begins with."""
        gateway, account = self._exchange.gateway, request.state.account
        body = await self._exchange.body(request, GenerateRequest)
        body, opening = await self._filled(account, body)
        name, body = openai.model_of(body)
        model = await self._exchange.model(request, name, GenerateRequest)
        body = await resolve_references(body, lambda named: gateway.state.responses.get(account, named))
        goes_on = body.get("previous_response_id") or body.get("conversation")
        if may_be_empty and goes_on and body.get("input") is None:
            body = {**body, "input": []}
        limits = gateway.limits(model)
        parsed = responses.parse_responses(body, limits, opening=opening, may_be_empty=may_be_empty)
        begins = None
        if parsed.conversation is not None:
            items, upto = await gateway.state.conversations.load(account, parsed.conversation)
            before, begins = _messages(items), f"{parsed.conversation}:{upto}"
        else:
            before = await gateway.state.responses.conversation(account, parsed.previous, self._beginning(account))
        parsed.generate.messages = parsed.messages(before)
        return model, parsed, begins

    async def _filled(self, account: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """The body with what its prompt template says, and the template's messages."""
        reference = parse_reference(body)
        if reference is None:
            return body, []
        prompts = self._exchange.gateway.prompts
        try:
            found = await asyncio.to_thread(prompts.find, reference.id, reference.version, account)
        except BrokenPrompt as broken:
            message = f"The template {reference.id} is broken: {broken}. Mend its file in the state directory."
            raise InvalidInput(message, param="prompt.id") from None
        if found is None:
            version = "" if reference.version is None else f" in version {reference.version}"
            raise NotFound(f"There is no prompt template {reference.id}{version}.", param="prompt")
        version, template = found
        body = {**body, "prompt": {**body["prompt"], "version": version}}
        said = [message.model_dump() for message in template.messages]
        return with_template(body, reference, template.instructions, said, template.defaults)

    def _beginning(self, account: str) -> Beginning:
        async def beginning(named: str) -> list[dict[str, Any]]:
            """Of a response that was made in a conversation: what was there before it."""
            conversation, _, upto = named.rpartition(":")
            items, _ = await self._exchange.gateway.state.conversations.load(account, conversation, int(upto))
            return _messages(items)

        return beginning

    async def create(self, request: Request) -> Response:
        gateway, account = self._exchange.gateway, request.state.account
        model, parsed, begins = await self._read(request)
        parsed.generate = with_headers(parsed.generate, request.headers)
        # What is made in the background is shown as it is made, to whoever asks for it.
        asked = replace(parsed.generate, stream=True) if parsed.background else parsed.generate
        events = await gateway.generate(model, asked, request.state.caller)

        async def keep(response: dict[str, Any]) -> None:
            if parsed.conversation is not None and response["status"] in ("completed", "incomplete"):
                said = stored_items(parsed.asked, "input", gateway.limits(model).takes) if parsed.turn else []
                items = [*said, *response["output"]]
                await gateway.state.conversations.append(account, parsed.conversation, response["id"], items)
            if parsed.store:
                turn = [*parsed.turn, *responses_answers.as_messages(response)]
                await gateway.state.responses.put(account, response, turn, begins)

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
        model, parsed, _ = await self._read(request, may_be_empty=True)
        count = await self._exchange.gateway.count_tokens(model, parsed.generate, request.state.caller)
        return json_answer({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, request: Request) -> Response:
        gateway = self._exchange.gateway
        model, parsed, _ = await self._read(request, may_be_empty=True)
        messages = parsed.generate.messages or []
        parsed.generate.messages = to_summarise(messages)
        parsed.generate.tools, parsed.generate.stream = None, False
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
        after, limit, descending = parse_page(request.query_params)
        turns = await store.conversation(account, response_id, self._beginning(account))
        asked = turns[: len(turns) - len(answered)]
        items = responses_answers.input_items(asked, response_id)
        return json_answer(page_of(items, after, limit, descending))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._exchange.gateway.state.responses.delete(request.state.account, response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a conversation as messages."""
    return responses.parse_input(items, ANY_KIND) if items else []


def _stream_of(response_id: str) -> str:
    """A response that is made in the background is a request's stream, and has its id."""
    return response_id.removeprefix("resp_")
