"""Anthropic's Messages, as its reference has them."""

from __future__ import annotations

from typing import Any

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.openai import CITY
from benchmarks.conformance.shapes import any_of, filled

QUESTION = [{"role": "user", "content": "What does math.sqrt do?"}]
USAGE = {"input_tokens": int, "output_tokens": int}
MESSAGE = {
    "id": str,
    "type": "message",
    "role": "assistant",
    "model": str,
    "content": filled({"type": "text", "text": str}),
    "stop_reason": any_of("end_turn", "max_tokens"),
    "stop_sequence": None,
    "usage": USAGE,
}
TOOL = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": CITY}


def _error(kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": filled(str)}}


def cases(models: Models) -> list[Case]:
    def ask(name: str, shape: Any, status: int = 200, path: str = "/v1/messages", **fields: Any) -> Case:
        body = {"model": models.chat, "max_tokens": 64, "messages": QUESTION, "temperature": 0, **fields}
        kept = {key: value for key, value in body.items() if value is not ...}
        return Case("anthropic", name, "POST", path, kept, status, shape)

    called = {"type": "tool_use", "id": str, "name": "get_weather", "input": {"city": str}}
    stream = {"model": models.chat, "max_tokens": 64, "messages": QUESTION, "temperature": 0, "stream": True}
    invalid = _error("invalid_request_error")
    return [
        ask("a message", MESSAGE),
        ask("a system prompt of blocks", MESSAGE, system=[{"type": "text", "text": "Be brief."}]),
        ask("a message that is cut", {**MESSAGE, "stop_reason": "max_tokens"}, max_tokens=1),
        ask("a stop sequence", {"stop_reason": "stop_sequence", "stop_sequence": " "}, stop_sequences=[" "]),
        ask("a tool that must be called", {"content": filled(called), "stop_reason": "tool_use"},
            tools=[TOOL], tool_choice={"type": "any"}, max_tokens=200),
        ask("tokens are counted", {"input_tokens": int}, path="/v1/messages/count_tokens", max_tokens=...),
        ask("no max_tokens", invalid, 400, max_tokens=...),
        ask("a role that nobody has", invalid, 400, messages=[{"role": "wizard", "content": "x"}]),
        ask("an unknown model", _error("not_found_error"), 404, model="no-such-model"),
        Case("anthropic", "no key", "POST", "/v1/messages", stream, 401, _error("authentication_error"), keyless=True),
        Case("anthropic", "a stream of events", "POST", "/v1/messages", stream, parts=_events,
             headers={"Content-Type": "text/event-stream", "request-id": ""}),
    ]  # fmt: skip


def _events(parts: list[tuple[str, Any]]) -> str | None:
    kinds = [name for name, data in parts if name != "ping"]
    if any(data["type"] != name for name, data in parts):
        return "an event's name is not its type"
    body = [name for name in kinds if name != "content_block_delta"]
    wanted = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    if body != wanted:
        return f"the events are {body}"
    last = next(data for name, data in parts if name == "message_delta")
    if last["delta"].get("stop_reason") not in ("end_turn", "max_tokens") or "output_tokens" not in last["usage"]:
        return "message_delta lacks stop_reason or output_tokens"
    text = "".join(data["delta"]["text"] for name, data in parts if name == "content_block_delta")
    return None if text else "there is no text"
