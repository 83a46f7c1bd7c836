"""OpenAI's Responses, as its reference and the Open Responses compliance tests have them."""

from __future__ import annotations

from typing import Any

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.openai import CITY, ERROR
from benchmarks.conformance.shapes import any_of, filled, problem

QUESTION = "What does math.sqrt do?"
TEXT = {"type": "output_text", "text": str, "annotations": list}
MESSAGE = {"type": "message", "id": str, "role": "assistant", "status": str, "content": filled(TEXT)}
USAGE = {"input_tokens": int, "output_tokens": int, "total_tokens": int}
RESPONSE = {
    "id": str,
    "object": "response",
    "created_at": any_of(int, float),
    "status": any_of("completed", "incomplete"),
    "model": str,
    "output": list,
    "usage": USAGE,
    "error": None,
    "incomplete_details": any_of(dict, None),
    "instructions": any_of(str, None),
    "max_output_tokens": any_of(int, None),
    "parallel_tool_calls": bool,
    "previous_response_id": any_of(str, None),
    "store": bool,
    "temperature": any_of(int, float),
    "text": {"format": {"type": "text"}},
    "tool_choice": any_of(str, dict),
    "tools": list,
    "top_p": any_of(int, float),
    "truncation": str,
    "metadata": dict,
}
CONVERSATION = {"id": str, "object": "conversation", "created_at": int, "metadata": {"a": "b"}}
NONE = "conv_" + "0" * 32
TOOL = {"type": "function", "name": "get_weather", "parameters": CITY}


def cases(models: Models) -> list[Case]:
    def ask(name: str, shape: Any, status: int = 200, **fields: Any) -> Case:
        body = {"model": models.chat, "input": QUESTION, "temperature": 0, **fields}
        kept = {key: value for key, value in body.items() if value is not ...}
        return Case("responses", name, "POST", "/v1/responses", kept, status, shape)

    stream = {"model": models.chat, "input": QUESTION, "temperature": 0, "stream": True, "store": False}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    call = {"type": "function_call", "name": "get_weather", "call_id": str, "arguments": str, "status": "completed"}
    cut = {**RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return [
        ask("a response", {**RESPONSE, "output": filled(MESSAGE)}),
        ask("items as input", {**RESPONSE, "output": filled(MESSAGE)}, input=[item]),
        ask("a response that is cut", cut, max_output_tokens=1),
        ask("a call", {"output": filled(call)}, tools=[TOOL], tool_choice="required", max_output_tokens=200),
        ask("what was sent comes back", {"metadata": {"a": "b"}, "top_p": 0.5}, metadata={"a": "b"}, top_p=0.5),
        ask("no input", ERROR, 400, input=...),
        ask("an unknown model", ERROR, 404, model="no-such-model"),
        Case("responses", "a stream of events", "POST", "/v1/responses", stream, parts=_events,
             headers={"Content-Type": "text/event-stream"}),
        ask("one that may be cut in the middle", {"truncation": "auto"}, truncation="auto"),
        ask("two ways to go on", ERROR, 400, conversation=NONE, previous_response_id="resp_none"),
        ask("a conversation that is not there", ERROR, 404, conversation=NONE),
        Case("responses", "a conversation", "POST", "/v1/conversations", {"items": [item], "metadata": {"a": "b"}},
             shape=CONVERSATION, needs=""),
        Case("responses", "a conversation of what is no item", "POST", "/v1/conversations", {"items": [{"type": "x"}]},
             400, ERROR, needs=""),
        *(Case("responses", f"{method} of a conversation that is not there", method, f"/v1/conversations/{NONE}",
               status=404, shape=ERROR, needs="") for method in ("GET", "DELETE")),
        Case("responses", "items of one that is not there", "GET", f"/v1/conversations/{NONE}/items", status=404,
             shape=ERROR, needs=""),
        Case("responses", "one that is not there", "GET", "/v1/responses/resp_none", status=404, shape=ERROR),
    ]  # fmt: skip


def _events(parts: list[tuple[str, Any]]) -> str | None:
    events = [data for _, data in parts if data != "[DONE]"]
    kinds = [event["type"] for event in events]
    if any(name and name != event["type"] for (name, _), event in zip(parts, events, strict=False)):
        return "an event's name is not its type"
    if kinds[:2] != ["response.created", "response.in_progress"]:
        return f"the stream begins with {kinds[:2]}"
    if kinds[-1] not in ("response.completed", "response.incomplete"):
        return f"the stream ends with {kinds[-1]}"
    numbers = [event["sequence_number"] for event in events]
    if numbers != sorted(set(numbers)):
        return "sequence numbers do not ascend"
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = [event["text"] for event in events if event["type"] == "response.output_text.done"]
    if not said or [said] != done:
        return "the deltas are not the text"
    return problem(events[-1]["response"], RESPONSE, "response")
