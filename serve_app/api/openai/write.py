"""Writing the OpenAI dialect: chat completions, completions, embeddings and model lists, plain and
streamed."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np

from serve_app.api import identity, sse
from serve_app.api.collect import Choice, collect
from serve_app.api.envelopes import openai_body
from serve_app.api.errors import ApiError, as_api_error
from serve_app.api.openai.prompt import echoed, joined, prompt_part, told_of_prompt
from serve_app.api.receipt import receipt
from serve_app.api.types import (
    ChoiceDone,
    EmbedRequest,
    Event,
    GenerateRequest,
    PromptTokens,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

log = logging.getLogger(__name__)


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts as integers; ``neurons``, the price in Workers AI's unit, is the only float (clients add
    up the rest)."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        **receipt(usage),
    }


def tool_call_json(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def tool_call_part(part: ToolCallDelta) -> dict[str, Any]:
    """Part of a call as a stream tells it: what the call is comes once, its arguments in pieces."""
    if part.name:
        return {"index": part.call_index, **tool_call_json(part)}
    return {"index": part.call_index, "function": {"arguments": part.arguments}}


def chat_logprobs(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    def one(token: str, logprob: float) -> dict[str, Any]:
        # A token that is part of a character shows as U+FFFD; its bytes are then those of the replacement.
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    content = [
        {
            **one(item.token, item.logprob),
            "top_logprobs": [one(token, logprob) for token, _, logprob in item.top],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: list[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """The legacy form: parallel arrays; ``offset`` is where in the text the first token starts."""
    offsets = []
    for item in logprobs:
        offsets.append(offset)
        offset += len(item.token)
    return {
        "tokens": [item.token for item in logprobs],
        "token_logprobs": [item.logprob for item in logprobs],
        # The sampled token stands among them, whether or not it is one of the likeliest.
        "top_logprobs": [
            {**{token: logprob for token, _, logprob in item.top}, item.token: item.logprob} for item in logprobs
        ],
        "text_offset": offsets,
    }


def chat_choices(request: GenerateRequest, choices: list[Choice]) -> list[dict[str, Any]]:
    """The ``choices`` of a chat completion; content is null where there are only tool calls."""
    rendered = []
    for index, choice in enumerate(choices):
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [tool_call_json(call) for call in choice.tool_calls]
        wanted = request.sampling.logprobs is not None
        rendered.append(
            {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(choice.logprobs) if wanted else None,
                "finish_reason": choice.finish_reason,
                **({"token_ids": list(choice.token_ids)} if request.return_token_ids else {}),
            }
        )
    return rendered


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{identity.answer_id()}", "object": kind, "created": identity.created(), "model": model}


def render_chat(request: GenerateRequest, events: Iterable[Event]) -> dict[str, Any]:
    choices, usage = collect(events)
    head = _head("chat.completion", "chatcmpl", request.model)
    told = told_of_prompt(request, choices[0].prompt)
    return {**head, "choices": chat_choices(request, choices), "usage": usage_json(usage), **told}


def render_completion(requests: Sequence[GenerateRequest], events: Iterable[Event]) -> dict[str, Any]:
    """``events`` of all prompts, joined by `collect.merge`; with ``echo`` each text starts with its
    prompt."""
    choices, usage = collect(events)
    first = requests[0]
    rendered = []
    for index, choice in enumerate(choices):
        request = requests[index // first.n]
        text = echoed(request, choice)
        logprobs = completion_logprobs(choice.logprobs, len(text)) if first.sampling.logprobs is not None else None
        if logprobs is not None and request.echo and choice.prompt is not None and choice.prompt.logprobs is not None:
            logprobs = joined(prompt_part(choice.prompt, first.sampling.logprobs or 0), logprobs)
        rendered.append(
            {
                "index": index,
                "text": text + choice.text,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                **({"token_ids": list(choice.token_ids)} if request.return_token_ids else {}),
                **told_of_prompt(request, choice.prompt),
            }
        )
    head = _head("text_completion", "cmpl", first.model)
    return {**head, "choices": rendered, "usage": usage_json(usage)}


async def stream_chat(request: GenerateRequest, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Chat completion chunks, the usage chunk if asked for, and ``[DONE]``. Errors become a last frame."""
    head = _head("chat.completion.chunk", "chatcmpl", request.model)
    wants_usage: dict[str, Any] = {"usage": None} if request.include_usage else {}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
        return sse.frame({**head, "choices": [choice], **wants_usage})

    try:
        # The role goes out before the first token, so that clients see the stream open while the prompt is
        # computed; unless it is to tell the prompt's tokens.
        unopened = request.continuous_usage
        for index in range(0 if unopened else request.n):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for event in events:
            if unopened:
                unopened = False
                if isinstance(event, Usage):
                    wants_usage["usage"] = usage_json(Usage(event.prompt_tokens, 0, event.cached_tokens))
                for index in range(request.n):
                    yield chunk(index, {"role": "assistant", "content": ""})
            if isinstance(event, Usage) and not event.final:
                wants_usage["usage"] = usage_json(event)
            elif isinstance(event, TextDelta):
                wanted = request.sampling.logprobs is not None and event.logprobs
                yield chunk(
                    event.index,
                    {"content": event.text},
                    None,
                    chat_logprobs(event.logprobs or []) if wanted else None,
                )
            elif isinstance(event, ReasoningDelta):
                yield chunk(event.index, {"reasoning_content": event.text})
            elif isinstance(event, ToolCallDelta):
                if event.name or event.arguments:
                    yield chunk(event.index, {"tool_calls": [tool_call_part(event)]})
            elif isinstance(event, ChoiceDone):
                more = {"token_ids": list(event.token_ids)} if request.return_token_ids else {}
                yield chunk(event.index, {}, event.finish_reason, **more)
            elif isinstance(event, PromptTokens):
                told = told_of_prompt(request, event)
                if told and event.index == 0:
                    yield sse.frame({**head, "choices": [], **wants_usage, **told})
            elif request.include_usage:
                yield sse.frame({**head, "choices": [], "usage": usage_json(event)})
        yield sse.DONE
    except Exception as error:
        yield error_frame(error)
    finally:
        await close(events)


async def stream_completion(requests: Sequence[GenerateRequest], events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Text completion chunks for all prompts (their events joined by `collect.merge`)."""
    first = requests[0]
    head = _head("text_completion", "cmpl", first.model)
    wants_usage: dict[str, Any] = {"usage": None} if first.include_usage else {}
    offsets = [0] * (len(requests) * first.n)

    def chunk(index: int, text: str, finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **more}
        return sse.frame({**head, "choices": [choice], **wants_usage})

    def beginning(event: PromptTokens) -> bytes:
        """The prompt, where it does not go out at once."""
        request = requests[event.index // first.n]
        told = told_of_prompt(request, event)
        if at_once or not request.echo:
            return chunk(event.index, "", **told) if told else b""
        offsets[event.index] = len(event.text)
        wanted = first.sampling.logprobs is not None and event.logprobs is not None
        part = prompt_part(event, first.sampling.logprobs or 0) if wanted else None
        return chunk(event.index, event.text, None, part, **told)

    # Text needs no worker to be known.
    at_once = first.prompt is not None and first.sampling.prompt_logprobs is None
    try:
        for index in range(len(offsets)):
            text = (requests[index // first.n].prompt or "") if first.echo and at_once else ""
            if text:
                yield chunk(index, text)
                offsets[index] = len(text)
        async for event in events:
            if isinstance(event, Usage) and not event.final:
                wants_usage["usage"] = usage_json(event)
            elif isinstance(event, TextDelta):
                wanted = first.sampling.logprobs is not None and event.logprobs
                logprobs = completion_logprobs(event.logprobs or [], offsets[event.index]) if wanted else None
                yield chunk(event.index, event.text, None, logprobs)
                offsets[event.index] += len(event.text)
            elif isinstance(event, ChoiceDone):
                more = {"token_ids": list(event.token_ids)} if first.return_token_ids else {}
                yield chunk(event.index, "", event.finish_reason, **more)
            elif isinstance(event, PromptTokens):
                if begun := beginning(event):
                    yield begun
            elif isinstance(event, Usage) and first.include_usage:
                yield sse.frame({**head, "choices": [], "usage": usage_json(event)})
        yield sse.DONE
    except Exception as error:
        yield error_frame(error)
    finally:
        await close(events)


def error_frame(error: Exception) -> bytes:
    """The last event of a stream that broke."""
    shown = as_api_error(error)
    if not isinstance(error, ApiError):
        log.error("a stream failed: %s", shown.message, exc_info=error)
    return sse.frame(openai_body(shown))


async def close(events: AsyncIterator[Event]) -> None:
    """Ends an event stream that may not have been read to its end, so that the engine request behind it is
    freed."""
    if hasattr(events, "aclose"):
        await events.aclose()


def render_embeddings(request: EmbedRequest, vectors: np.ndarray, usage: Usage) -> dict[str, Any]:
    """``vectors``: float array [n, d]. base64 is that of little-endian float32, as OpenAI's clients
    expect."""
    data = []
    for index, vector in enumerate(np.asarray(vectors, dtype="<f4")):
        embedding: Any = (
            base64.b64encode(vector.tobytes()).decode() if request.encoding == "base64" else vector.tolist()
        )
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    counted = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        **receipt(usage),
    }
    return {"object": "list", "data": data, "model": request.model, "usage": counted}
