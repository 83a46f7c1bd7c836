"""The native answer of text generation: a result inside the envelope, or the native event stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

from serve_app.api import sse
from serve_app.api.collect import collect, join_call
from serve_app.api.envelopes import envelope, success
from serve_app.api.errors import ApiError, as_api_error
from serve_app.api.fields.body import parse_inner
from serve_app.api.openai.write import chat_choices, chat_logprobs, close, usage_json
from serve_app.api.types import (
    ChoiceDone,
    Event,
    GenerateRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)

log = logging.getLogger(__name__)


def tool_call_item(call: ToolCallDelta) -> dict[str, Any]:
    """A tool call as native readers (name, arguments as an object) and OpenAI-minded ones (function, index)
    want it."""
    return {
        "index": call.call_index,
        "id": call.id,
        "type": "function",
        "name": call.name,
        "arguments": _parsed(call.arguments),
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _parsed(arguments: str) -> Any:
    """Arguments as the object they are; as the text they are where the model broke them."""
    try:
        return parse_inner(arguments)
    except ValueError:
        return arguments


def _response(request: GenerateRequest, text: str) -> Any:
    """In JSON mode the object or array itself, as Workers AI gives it; text where it is cut off or plain."""
    if request.answer_format is None or not request.answer_format.is_json:
        return text
    try:
        found = parse_inner(text)
    except ValueError:
        return text
    return found if isinstance(found, (dict, list)) else text


def render_generate(request: GenerateRequest, events: Iterable[Event]) -> dict[str, Any]:
    """The enveloped answer: native fields for the first choice, and OpenAI's ``choices`` with all of them."""
    choices, usage = collect(events)
    first = choices[0]
    return success(
        {
            "response": _response(request, first.text),
            "tool_calls": [tool_call_item(call) for call in first.tool_calls],
            "finish_reason": first.finish_reason,
            "usage": usage_json(usage),
            "choices": chat_choices(request, choices),
        }
    )


async def frames(request: GenerateRequest, events: AsyncIterator[Event]) -> AsyncGenerator[dict[str, Any], None]:
    """The native stream's bodies: ``{"response", "p"}`` per delta, then one with ``finish_reason`` and ``usage``.

    They carry ``index`` only where more than one choice was asked for. Errors pass through.
    """
    finish: dict[int, str] = {}
    calls: dict[int, list[ToolCallDelta]] = {}
    usage = Usage()
    try:
        async for event in events:
            if isinstance(event, Usage):
                usage = event
                continue
            where = {"index": event.index} if request.n > 1 else {}
            if isinstance(event, ChoiceDone):
                finish[event.index] = event.finish_reason
            elif isinstance(event, TextDelta):
                body: dict[str, Any] = {"response": event.text, **where}
                if request.sampling.logprobs is not None and event.logprobs:
                    body["logprobs"] = chat_logprobs(event.logprobs)
                yield {**body, "p": sse.padding(event.text)}
            elif isinstance(event, ReasoningDelta):
                # Where Cloudflare's own AI SDK provider looks for it, in native streams too.
                delta = {"index": event.index, "delta": {"reasoning_content": event.text}}
                yield {"response": "", **where, "choices": [delta], "p": sse.padding(event.text)}
            elif isinstance(event, ToolCallDelta):
                # Native readers take the arguments as an object, so a call is told once it is whole.
                call = join_call(calls.setdefault(event.index, []), event)
                if event.last:
                    yield {"response": "", **where, "tool_calls": [tool_call_item(call)]}
        yield {"response": "", "finish_reason": finish.get(0, "stop"), "usage": usage_json(usage)}
    finally:
        await close(events)


async def stream_generate(request: GenerateRequest, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """:func:`frames` as server-sent events, and ``[DONE]``.

    An error becomes a last frame without ``[DONE]``, by which clients see that the stream was cut.
    """
    bodies = frames(request, events)
    try:
        async for body in bodies:
            yield sse.frame(body)
        yield sse.DONE
    except Exception as error:
        shown = as_api_error(error)
        if not isinstance(error, ApiError):
            log.error("a stream failed: %s", shown.message, exc_info=error)
        yield sse.frame({"response": "", **envelope(shown)})
    finally:
        await bodies.aclose()
