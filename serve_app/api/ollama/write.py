"""Writing Ollama's dialect: whole answers, and streams of one JSON object a line."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import orjson

from serve_app.api.collect import collect, join_call
from serve_app.api.errors import ApiError, as_api_error
from serve_app.api.openai.write import close
from serve_app.api.receipt import receipt
from serve_app.api.types import (
    ChoiceDone,
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

log = logging.getLogger(__name__)

Form = Literal["chat", "generate"]
# The version of Ollama whose API these routes have; clients ask before they use what newer ones brought.
API_VERSION = "0.13.0"
MEDIA_TYPE = "application/x-ndjson"


@dataclass(slots=True)
class Clock:
    """When a request came and when its answer began, in nanoseconds of a monotonic clock."""

    began: int = field(default_factory=time.monotonic_ns)
    first: int = 0

    def durations(self, usage: Usage) -> dict[str, int]:
        now = time.monotonic_ns()
        first = self.first or now
        return {
            "total_duration": now - self.began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self.began,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - first,
        }


def error_body(error: ApiError) -> dict[str, Any]:
    """Ollama's ``error``, and the code beside it."""
    return {"error": error.message, "success": False, "errors": [{"code": error.code, "message": error.message}]}


def render_loaded(model: str, form: Form) -> dict[str, Any]:
    """The answer to a request with nothing to answer: the model is there."""
    return {**_part(model, form, ""), "done": True, "done_reason": "load"}


def render_answer(model: str, form: Form, events: Iterable[Event], clock: Clock) -> dict[str, Any]:
    choices, usage = collect(events)
    first = choices[0]
    body = _part(model, form, first.text, first.reasoning, first.tool_calls)
    if first.logprobs:
        body["logprobs"] = _logprobs(first.logprobs)
    return {
        **body,
        "done": True,
        "done_reason": _reason(first.finish_reason),
        **clock.durations(usage),
        "usage": receipt(usage),
    }


async def stream_answer(model: str, form: Form, events: AsyncIterator[Event], clock: Clock) -> AsyncIterator[bytes]:
    """A line per piece of the answer, and a last one with ``done``. An error is a last line of its own."""
    reason, usage = "stop", Usage()
    calls: list[ToolCallDelta] = []
    try:
        async for event in events:
            clock.first = clock.first or time.monotonic_ns()
            if isinstance(event, Usage):
                usage = event
            elif isinstance(event, ChoiceDone):
                reason = event.finish_reason
            elif isinstance(event, ReasoningDelta):
                yield _line({**_part(model, form, "", event.text), "done": False})
            elif isinstance(event, ToolCallDelta):
                # Arguments are an object here, so a call is told once it is whole.
                call = join_call(calls, event)
                if event.last:
                    yield _line({**_part(model, form, "", "", [call]), "done": False})
            elif isinstance(event, TextDelta) and (event.text or event.logprobs):
                told = {"logprobs": _logprobs(event.logprobs)} if event.logprobs else {}
                yield _line({**_part(model, form, event.text), "done": False, **told})
        last = {"done": True, "done_reason": _reason(reason), **clock.durations(usage), "usage": receipt(usage)}
        yield _line({**_part(model, form, ""), **last})
    except Exception as error:
        shown = as_api_error(error)
        if not isinstance(error, ApiError):
            log.error("a stream failed: %s", shown.message, exc_info=error)
        yield _line(error_body(shown))
    finally:
        await close(events)


def render_embed(model: str, vectors: np.ndarray | None, usage: Usage, clock: Clock) -> dict[str, Any]:
    """``vectors`` float [n, d], or None where there were no texts."""
    rows = [] if vectors is None else np.asarray(vectors, np.float32).tolist()
    return {
        "model": model,
        "embeddings": rows,
        "total_duration": time.monotonic_ns() - clock.began,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "usage": receipt(usage),
    }


def render_embedding(vectors: np.ndarray | None, usage: Usage) -> dict[str, Any]:
    found = [] if vectors is None else np.asarray(vectors, np.float32)[0].tolist()
    return {"embedding": found, "usage": receipt(usage)}


def _part(model: str, form: Form, text: str, thinking: str = "", calls: Iterable[ToolCallDelta] = ()) -> dict[str, Any]:
    head = {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    thought = {"thinking": thinking} if thinking else {}
    if form == "generate":
        return {**head, "response": text, **thought}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
    if listed := [_call(call) for call in calls]:
        message["tool_calls"] = listed
    return {**head, "message": message}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = {}
    # What the model broke, or the limit cut, is no object.
    whole = arguments if isinstance(arguments, dict) else {}
    return {"id": call.id, "function": {"index": call.call_index, "name": call.name, "arguments": whole}}


def _logprobs(logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    def one(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    return [
        {**one(item.token, item.logprob), "top_logprobs": [one(token, p) for token, _, p in item.top]}
        for item in logprobs
    ]


def _reason(finish: str) -> str:
    return "length" if finish == "length" else "stop"


def _line(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body) + b"\n"
