"""OpenAI's API reference: models, chat completions, completions, embeddings, errors."""

from __future__ import annotations

import base64
import json
from typing import Any

from benchmarks.conformance.case import Case, Models
from benchmarks.conformance.shapes import NUMBER, any_of, filled, length, problem

QUESTION = [{"role": "user", "content": "What does math.sqrt do?"}]
USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}
HEAD = {"id": str, "created": int, "model": str}
MESSAGE = {"role": "assistant", "content": any_of(str, None), "refusal?": any_of(str, None)}
FINISH = any_of("stop", "length", "tool_calls")
CHAT = {
    **HEAD,
    "object": "chat.completion",
    "choices": filled({"index": int, "message": MESSAGE, "finish_reason": FINISH}),
    "usage": USAGE,
}
CHUNK = {
    **HEAD,
    "object": "chat.completion.chunk",
    "choices": [{"index": int, "delta": dict, "finish_reason": any_of(FINISH, None)}],
}
ERROR = {"error": {"message": filled(str), "type": str, "param": any_of(str, None), "code": any_of(str, None)}}
TOP = {"token": str, "logprob": NUMBER, "bytes": any_of([int], None)}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
# Nothing in it can be long, so that no model is cut.
ANSWER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


def cases(models: Models) -> list[Case]:
    return [*_models(models), *_chats(models), *_refused(models), *_completions(models), *_embeddings(models)]


def _models(models: Models) -> list[Case]:
    model = {"id": str, "object": "model", "created": int, "owned_by": str}
    return [
        Case("openai", "models are a list", "GET", "/v1/models", shape={"object": "list", "data": filled(model)}),
        Case("openai", "a model by its id", "GET", f"/v1/models/{models.chat}", shape=model),
        Case("openai", "a model that is not there is 404", "GET", "/v1/models/no-such-model", status=404, shape=ERROR),
    ]


def _chats(models: Models) -> list[Case]:
    def chat(name: str, shape: Any = CHAT, **fields: Any) -> Case:
        body = {"model": models.chat, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
        return Case("openai", name, "POST", "/v1/chat/completions", body, shape=shape)

    def choice(**fields: Any) -> dict[str, Any]:
        return {**CHAT, "choices": filled({"index": int, "message": MESSAGE, **fields})}

    content = {"token": str, "logprob": NUMBER, "bytes": any_of([int], None), "top_logprobs": length(2, TOP)}
    call = {"id": str, "type": "function", "function": {"name": "get_weather", "arguments": _object_text}}
    stream = {"model": models.chat, "messages": QUESTION, "temperature": 0, "max_tokens": 24, "stream": True}
    events = {"Content-Type": "text/event-stream"}
    return [
        chat("a chat completion"),
        chat("one token is cut with length", choice(finish_reason="length"), max_tokens=1),
        chat("max_completion_tokens counts as well", choice(finish_reason="length"), max_completion_tokens=1),
        chat("a stop string ends with stop", choice(finish_reason="stop"), stop=[" ", "e", "t", "a"]),
        chat("n answers", {**CHAT, "choices": length(2, {"index": int, "message": MESSAGE})}, n=2),
        chat("log-probabilities", choice(logprobs={"content": filled(content)}), logprobs=True, top_logprobs=2),
        chat(
            "a tool that must be called",
            choice(finish_reason=any_of("tool_calls", "stop")),
            tools=[TOOL], tool_choice="required", max_tokens=200,
        ),
        chat(
            "a call's arguments are an object",
            {"choices": filled({"message": {"tool_calls": filled(call)}})},
            tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_tokens=200,
        ),
        chat(
            "an answer of a schema",
            {"choices": filled({"message": {"content": _object_text}})},
            response_format=FORMAT, max_tokens=200,
        ),
        chat("null is as left out", CHAT, stop=None, n=None, tools=None, seed=None, user=None, logit_bias=None),
        chat("fields that nobody knows change nothing", CHAT, nobody_knows={"this": 1}),
        Case(
            "openai", "a stream of chunks ends with [DONE]", "POST", "/v1/chat/completions", stream,
            parts=_chunks, headers=events,
        ),
        Case(
            "openai", "a stream's last chunk has the usage", "POST", "/v1/chat/completions",
            {**stream, "stream_options": {"include_usage": True}}, parts=_with_usage, headers=events,
        ),
    ]  # fmt: skip


def _refused(models: Models) -> list[Case]:
    def refused(name: str, status: int, shape: Any = ERROR, **fields: Any) -> Case:
        body = {"model": models.chat, "messages": QUESTION, **fields}
        kept = {key: value for key, value in body.items() if value is not ...}
        return Case("openai", name, "POST", "/v1/chat/completions", kept, status, shape)

    def error(**fields: Any) -> dict[str, Any]:
        return {"error": {**ERROR["error"], **fields}}

    invalid = error(type="invalid_request_error")
    key = Case(
        "openai", "a wrong key's code is invalid_api_key", "GET", "/v1/models", status=401,
        shape=error(code="invalid_api_key"), keyless=True, ours="codes are the numbers of Workers AI but for two",
    )  # fmt: skip
    return [
        refused("an unknown model is 404", 404, error(code="model_not_found"), model="no-such-model"),
        refused("no messages", 400, invalid, messages=...),
        refused("empty messages", 400, invalid, messages=[]),
        refused("messages that are none", 400, invalid, messages="hello"),
        refused("a role that nobody has", 400, invalid, messages=[{"role": "wizard", "content": "x"}]),
        refused("a temperature that is no number", 400, invalid, temperature="hot"),
        refused("max_tokens below 1", 400, invalid, max_tokens=-1),
        refused("tool_choice without tools", 400, invalid, tool_choice="required"),
        refused(
            "a prompt beyond the context", 400, error(code="context_length_exceeded"),
            messages=[{"role": "user", "content": "one two three four " * 12_000}],
        ),
        Case("openai", "no key is 401", "GET", "/v1/models", status=401, shape=ERROR, keyless=True),
        key,
        Case("openai", "a route that is not there is 404", "GET", "/v1/no/such/route", status=404, shape=ERROR),
        Case("openai", "a method that is not there is 405", "GET", "/v1/chat/completions", status=405),
    ]  # fmt: skip


def _completions(models: Models) -> list[Case]:
    body = {"model": models.chat, "prompt": "import os\n", "max_tokens": 4, "temperature": 0}
    choice = {"index": int, "text": str, "finish_reason": FINISH, "logprobs": None}
    shape = {**HEAD, "object": "text_completion", "choices": filled(choice), "usage": USAGE}
    legacy = {
        "tokens": filled(str),
        "token_logprobs": [any_of(NUMBER, None)],
        "top_logprobs": [any_of(dict, None)],
        "text_offset": [int],
    }
    scored = {**shape, "choices": filled({**choice, "text": _begins("import os\n"), "logprobs": legacy})}
    path = "/v1/completions"
    return [
        Case("openai", "a completion", "POST", path, body, shape=shape),
        Case(
            "openai", "several prompts", "POST", path, {**body, "prompt": ["a", "b"]},
            shape={"choices": length(2, choice)},
        ),
        Case("openai", "the prompt is scored", "POST", path, {**body, "echo": True, "logprobs": 1}, shape=scored),
        Case("openai", "a stream of text", "POST", path, {**body, "stream": True}, parts=_text_chunks),
        Case("openai", "no prompt", "POST", path, {"model": models.chat, "prompt": []}, 400, ERROR),
    ]  # fmt: skip


def _embeddings(models: Models) -> list[Case]:
    def embed(name: str, vector: Any, status: int = 200, **fields: Any) -> Case:
        body = {"model": models.embed, "input": ["one", "two"], **fields}
        items = length(2, {"object": "embedding", "index": int, "embedding": vector})
        shape = {"object": "list", "data": items, "model": str, "usage": {"prompt_tokens": int, "total_tokens": int}}
        answer = shape if status == 200 else ERROR
        return Case("openai", name, "POST", "/v1/embeddings", body, status, answer, needs="embed")

    return [
        embed("embeddings", filled(NUMBER)),
        embed("embeddings in base64", _base64, encoding_format="base64"),
        embed("embeddings of token ids", filled(NUMBER), input=[[5, 6], [7]]),
        embed("embeddings of nothing", None, 400, input=[]),
        embed("embeddings of an empty text", None, 400, input=""),
    ]


def _chunks(parts: list[tuple[str, Any]]) -> str | None:
    *chunks, last = [data for _, data in parts]
    if last != "[DONE]":
        return "the stream does not end with [DONE]"
    if told := problem(chunks, [CHUNK], "chunks"):
        return told
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    if deltas[0]["delta"].get("role") != "assistant":
        return "the first delta has no role"
    if len({chunk["id"] for chunk in chunks}) != 1:
        return "the chunks have several ids"
    if [choice["finish_reason"] for choice in deltas if choice["finish_reason"]] != [deltas[-1]["finish_reason"]]:
        return "not the last chunk alone has a finish_reason"
    return None if any(choice["delta"].get("content") for choice in deltas) else "there is no content"


def _with_usage(parts: list[tuple[str, Any]]) -> str | None:
    chunks = [data for _, data in parts]
    if chunks[-1] != "[DONE]" or chunks[-2].get("choices") != []:
        return "the last chunk before [DONE] has choices"
    if told := problem(chunks[-2].get("usage"), USAGE, "usage"):
        return told
    return None if all(c.get("usage", 1) is None for c in chunks[:-2]) else "an earlier chunk's usage is not null"


def _text_chunks(parts: list[tuple[str, Any]]) -> str | None:
    *chunks, last = [data for _, data in parts]
    shape = {**HEAD, "object": "text_completion", "choices": [{"index": int, "text": str}]}
    return problem(chunks, [shape], "chunks") or (None if last == "[DONE]" else "the stream does not end with [DONE]")


def _object_text(value: Any) -> str | None:
    try:
        return None if isinstance(json.loads(value), dict) else "is JSON of no object"
    except (ValueError, TypeError):
        return "is not the JSON of an object"


def _begins(text: str) -> Any:
    return lambda value: None if str(value).startswith(text) else f"does not begin with {text!r}"


def _base64(value: Any) -> str | None:
    try:
        size = len(base64.b64decode(value, validate=True))
    except (ValueError, TypeError):
        return "is no base64"
    return None if size and size % 4 == 0 else f"has {size} bytes, which are no float32"
