"""Writing the Anthropic dialect: messages, their events, token counts and errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from serve_app.api import identity, sse
from serve_app.api.envelopes import status_of
from serve_app.api.errors import ApiError, as_api_error
from serve_app.api.fields.body import parse_inner
from serve_app.api.openai.write import close
from serve_app.api.receipt import receipt
from serve_app.api.types import ChoiceDone, Event, GenerateRequest, ReasoningDelta, TextDelta, ToolCallDelta, Usage

log = logging.getLogger(__name__)

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error, with Cloudflare's ``errors`` (and so the code) beside it."""
    kind = _ERROR_TYPES.get(status_of(error, native=False), "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "errors": [{"code": error.code, "message": error.message}],
        "success": False,
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    """Anthropic's ``input_tokens`` are those that were computed: cached ones stand beside them, not among them."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **receipt(usage),
    }


class _Message:
    """A message that grows by events. Each :meth:`feed` gives the frames that tell of the growth, so that the whole
    message and the streamed one cannot differ."""

    def __init__(self, request: GenerateRequest, prompt_tokens: int) -> None:
        self.body: dict[str, Any] = {
            "id": f"msg_{identity.answer_id()}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # What is known before the first token; message_delta brings the rest.
            "usage": usage_json(Usage(prompt_tokens=prompt_tokens)),
        }
        # The kind of the block that grows, "" between blocks.
        self._open = ""
        self._shows_reasoning = request.show_reasoning
        self._arguments = ""

    def start(self) -> list[bytes]:
        return [_frame("message_start", message=self.body), _frame("ping")]

    def feed(self, event: Event) -> list[bytes]:
        if isinstance(event, TextDelta):
            return self._grow("text", event.text)
        if isinstance(event, ReasoningDelta):
            return self._grow("thinking", event.text) if self._shows_reasoning else []
        if isinstance(event, ToolCallDelta):
            return self._call(event)
        if isinstance(event, ChoiceDone):
            reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
            ended = "stop_sequence" if event.stop is not None else "end_turn"
            self.body["stop_reason"] = reasons.get(event.finish_reason, ended)
            if self.body["stop_reason"] == "stop_sequence":
                self.body["stop_sequence"] = event.stop
            return self._stop_block()
        if not isinstance(event, Usage):
            return []
        self.body["usage"] = usage_json(event)
        delta = {name: self.body[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *self._stop_block(),
            _frame("message_delta", delta=delta, usage=self.body["usage"]),
            _frame("message_stop"),
        ]

    def _grow(self, kind: str, piece: str) -> list[bytes]:
        """More of a block of text or thinking."""
        if not piece:
            return []
        frames = []
        if self._open != kind:
            frames += self._stop_block()
            # Nobody signs reasoning here; clients send the field back as it came.
            signed = {"signature": ""} if kind == "thinking" else {}
            frames.append(self._start_block({"type": kind, kind: "", **signed}))
        self._block[kind] += piece
        return [*frames, self._delta({"type": f"{kind}_delta", kind: piece})]

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        frames = []
        if call.name:
            frames += self._stop_block()
            frames.append(self._start_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}))
            self._arguments = ""
        self._arguments += call.arguments
        if call.arguments:
            frames.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        if call.last:
            self._block["input"] = _input(self._arguments)
            frames += self._stop_block()
        return frames

    @property
    def _block(self) -> dict[str, Any]:
        return self.body["content"][-1]

    @property
    def _index(self) -> int:
        return len(self.body["content"]) - 1

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self.body["content"].append(block)
        self._open = block["type"]
        return _frame("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame("content_block_delta", index=self._index, delta=delta)

    def _stop_block(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [_frame("content_block_stop", index=self._index)]


def _input(arguments: str) -> dict[str, Any]:
    """A tool's input; what the model broke stands where Anthropic's documentation puts invalid JSON."""
    try:
        return parse_inner(arguments)
    except ValueError:
        return {"INVALID_JSON": arguments}


def _frame(kind: str, **body: Any) -> bytes:
    return sse.event(kind, {"type": kind, **body})


def render_message(request: GenerateRequest, events: Iterable[Event]) -> dict[str, Any]:
    message = _Message(request, 0)
    for event in events:
        message.feed(event)
    return message.body


async def stream_message(
    request: GenerateRequest, events: AsyncIterator[Event], prompt_tokens: int
) -> AsyncIterator[bytes]:
    """The events of a message, from message_start to message_stop. An error becomes a last event `error`."""
    message = _Message(request, prompt_tokens)
    try:
        for frame in message.start():
            yield frame
        async for event in events:
            for frame in message.feed(event):
                yield frame
    except Exception as error:
        shown = as_api_error(error)
        if not isinstance(error, ApiError):
            log.error("a stream failed: %s", shown.message, exc_info=error)
        yield sse.event("error", error_body(shown))
    finally:
        await close(events)


def render_count(prompt_tokens: int) -> dict[str, Any]:
    return {"input_tokens": prompt_tokens}
