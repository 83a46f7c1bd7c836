"""How each dialect answers, whole and in events: what a client has been shown, by the place where it stood."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-3  # of numbers: what shares a batch differs, and with it their rounding


@dataclass(slots=True)
class Seen:
    """Of one answer: ``texts`` by place (a choice, a tool call), ``numbers`` of vectors and scores, tokens as the usage
    says, how many came with a log-probability, and the ids of the request and of a stored response. ``key``: the
    `Idempotency-Key` under which its client sends it again by itself.
    """

    texts: dict[str, str] = field(default_factory=dict)
    numbers: list[float] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    logprobs: int = 0
    # Micro-neurons that the client was told.
    neurons: int | None = None
    finished: bool = False
    # The request was answered with an error instead of an answer.
    refused: bool = False
    error: Any = None
    request: str = ""
    response: str = ""
    key: str = ""

    def add(self, place: object, text: str | None) -> None:
        if text:
            self.texts[str(place)] = self.texts.get(str(place), "") + text

    def problem(self, wanted: Seen) -> str | None:
        """What is wrong with a finished answer."""
        if self.texts != wanted.texts:
            return f"the text is {_short(self.texts)} instead of {_short(wanted.texts)}"
        if self.usage != wanted.usage:
            return f"usage of {self.usage} tokens instead of {wanted.usage}"
        if self.logprobs and self.usage is not None and self.logprobs != self.usage[1]:
            return f"{self.logprobs} tokens were shown and {self.usage[1]} are counted"
        close = len(self.numbers) == len(wanted.numbers) and all(
            abs(got - want) < TOLERANCE for got, want in zip(self.numbers, wanted.numbers, strict=True)
        )
        return None if close else f"other numbers: {_short(self.numbers)}"

    def part_problem(self, wanted: Seen) -> str | None:
        """What is wrong with an answer that has been cut off."""
        for place, text in self.texts.items():
            if not wanted.texts.get(place, "").startswith(text):
                return f"the beginning is {_short(text)} of {_short(wanted.texts.get(place))}"
        return None


@dataclass(slots=True, frozen=True)
class Dialect:
    """``whole(seen, body)`` and ``event(seen, event)`` enter what a client is shown. ``done``: a stream ends with
    ``[DONE]`` and not with an event of its own.
    """

    whole: Callable[[Seen, dict[str, Any]], None]
    event: Callable[[Seen, dict[str, Any]], None]
    done: bool = False


def _native_whole(seen: Seen, body: dict[str, Any]) -> None:
    result = body["result"]
    for choice in result["choices"]:
        _message(seen, choice["index"], choice["message"])
    _openai_usage(seen, result["usage"])


def _native_event(seen: Seen, event: dict[str, Any]) -> None:
    if "errors" in event:
        seen.error = event["errors"]
        return
    seen.add(event.get("index", 0), event.get("response"))
    for choice in event.get("choices") or ():
        seen.add(f"{choice['index']} reasoning", choice["delta"].get("reasoning_content"))
    if usage := event.get("usage"):
        _openai_usage(seen, usage)


def _chat_whole(seen: Seen, body: dict[str, Any]) -> None:
    for choice in body["choices"]:
        if "text" in choice:
            seen.add(choice["index"], choice["text"])
        else:
            _message(seen, choice["index"], choice["message"])
            seen.logprobs += len((choice.get("logprobs") or {}).get("content") or ())
    _openai_usage(seen, body["usage"])


def _chat_event(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = event["error"]
        return
    for choice in event["choices"]:
        if "text" in choice:
            seen.add(choice["index"], choice["text"])
        else:
            _message(seen, choice["index"], choice["delta"])
            seen.logprobs += len((choice.get("logprobs") or {}).get("content") or ())
    if usage := event.get("usage"):
        _openai_usage(seen, usage)


def _message(seen: Seen, index: int, message: dict[str, Any]) -> None:
    seen.add(index, message.get("content"))
    seen.add(f"{index} reasoning", message.get("reasoning_content"))
    for at, call in enumerate(message.get("tool_calls") or ()):
        place = f"{index} call {call.get('index', at)}"
        seen.add(place, call["function"].get("name"))
        seen.add(place, call["function"].get("arguments"))


def _openai_usage(seen: Seen, usage: dict[str, Any]) -> None:
    _used(seen, usage, usage["prompt_tokens"], usage.get("completion_tokens", 0))


def _used(seen: Seen, usage: dict[str, Any], read: int, written: int) -> None:
    seen.usage = read, written
    if "neurons" in usage:
        seen.neurons = round(usage["neurons"] * 10**6)


def _response_whole(seen: Seen, body: dict[str, Any]) -> None:
    for at, item in enumerate(body["output"]):
        if item["type"] in ("message", "reasoning"):
            seen.add(at, "".join(part["text"] for part in item["content"]))
        elif item["type"] == "function_call":
            seen.add(at, item["name"] + item["arguments"])
    _used(seen, body["usage"], body["usage"]["input_tokens"], body["usage"]["output_tokens"])
    seen.response = body["id"]


def _response_event(seen: Seen, event: dict[str, Any]) -> None:
    match event["type"]:
        case "response.output_text.delta" | "response.reasoning_text.delta" | "response.function_call_arguments.delta":
            seen.add(event["output_index"], event["delta"])
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            seen.add(event["output_index"], event["item"]["name"])
        case "response.completed" | "response.incomplete":
            at_last = Seen()
            _response_whole(at_last, event["response"])
            seen.usage, seen.response, seen.finished = at_last.usage, at_last.response, True
            seen.neurons = at_last.neurons
            if at_last.texts != seen.texts:
                seen.error = f"the whole response differs from its deltas: {_short(at_last.texts)}"
        case "response.failed" | "error":
            seen.error = event


def _messages_whole(seen: Seen, body: dict[str, Any]) -> None:
    for at, block in enumerate(body["content"]):
        shown = block.get("text") or block.get("thinking")
        seen.add(at, block["name"] + json.dumps(block["input"]) if block["type"] == "tool_use" else shown)
    _messages_usage(seen, body["usage"])


def _messages_event(seen: Seen, event: dict[str, Any]) -> None:
    match event["type"]:
        case "content_block_delta":
            delta = event["delta"]
            seen.add(event["index"], delta.get("text") or delta.get("thinking") or delta.get("partial_json"))
        case "message_delta":
            _messages_usage(seen, event["usage"])
        case "message_stop":
            seen.finished = True
        case "error":
            seen.error = event["error"]


def _messages_usage(seen: Seen, usage: dict[str, Any]) -> None:
    read = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    _used(seen, usage, read, usage["output_tokens"])


def _numbers_whole(seen: Seen, body: dict[str, Any]) -> None:
    """Vectors and scores of all tasks that do not stream."""
    result = body.get("result", body)
    for item in result.get("data") or result["response"]:
        if isinstance(item, list):
            seen.numbers += item
        else:
            seen.numbers += item["embedding"] if "embedding" in item else [item["id"], item["score"]]
    _openai_usage(seen, result["usage"])


def _labels_whole(seen: Seen, body: dict[str, Any]) -> None:
    for place, row in enumerate(body["result"]):
        seen.add(place, row["label"])
        seen.numbers.append(row["score"])


def _transcript_whole(seen: Seen, body: dict[str, Any]) -> None:
    result = body["result"]
    seen.add("text", result["text"])
    seen.numbers += [time for segment in result["segments"] for time in (segment["start"], segment["end"])]


def _no_event(seen: Seen, event: dict[str, Any]) -> None:
    raise ValueError("this task does not stream")


NATIVE = Dialect(_native_whole, _native_event, True)
CHAT = Dialect(_chat_whole, _chat_event, True)
RESPONSES = Dialect(_response_whole, _response_event)
MESSAGES = Dialect(_messages_whole, _messages_event)
NUMBERS = Dialect(_numbers_whole, _no_event)
LABELS = Dialect(_labels_whole, _no_event)
TRANSCRIPT = Dialect(_transcript_whole, _no_event)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 160 else text[:160] + "..."
