"""Request bodies: right ones of every dialect, with values put in their place that no client should send."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz import others
from serve_app.api.anthropic.read import parse_count, parse_messages_request
from serve_app.api.errors import ApiError, InvalidInput
from serve_app.api.fields.body import parse_body
from serve_app.api.multipart import BodyPart, read_multipart, write_multipart
from serve_app.api.openai.read import parse_chat, parse_completions, parse_embeddings
from serve_app.api.responses.read import parse_responses
from serve_app.api.types import GenerateRequest, ModelLimits
from serve_app.api.workers_ai.read import parse_run_target
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.grammar.answer import answer_grammar, needs_grammar, token_rule
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.text.prompt import fit_context, prompt_ids
from serve_app.text.tokenizer import Tokenizer

WINDOW = 4096
LIMITS = ModelLimits(context_window=WINDOW, vocab_size=1000)
MODEL = "@cf/pico/pico-instruct"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city", "parameters": CITY}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
COMMON = {
    "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["a", "b"], "n": 2,
    "max_tokens": 9, "logit_bias": {"5": 1.5}, "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "auto",
    "metadata": {"a": "b"}, "options": {"deadlineMs": 900}, "chat_template_kwargs": {"thinking": True},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}

Bodies = dict[str, tuple[dict[str, Any], Callable[[bytes], Any]]]
# A right body of each way in, and what reads it.
READERS: Bodies = {
    "native": ({"messages": TALK, **COMMON, "response_format": FORMAT}, lambda b: parse_generate(b, MODEL, LIMITS)),
    "native prompt": ({"prompt": "x", "raw": True, "guided_json": CITY}, lambda b: parse_generate(b, MODEL, LIMITS)),
    "run": ({"model": MODEL, "input": {"prompt": "x"}, "options": {}}, parse_run_target),
    "chat": ({"model": MODEL, "messages": TALK, **COMMON, "response_format": FORMAT, "logprobs": True,
              "top_logprobs": 2, "stream_options": {"include_usage": True}}, lambda b: parse_chat(b, LIMITS)),
    "completions": ({"model": MODEL, "prompt": ["a", [1, 2]], "echo": True, "logprobs": 2, **COMMON},
                    lambda b: parse_completions(b, LIMITS)),
    "embeddings": ({"model": MODEL, "input": ["a", "b"], "dimensions": 8, "encoding_format": "float"},
                   parse_embeddings),
    "responses": (
        {"model": MODEL, "instructions": "Be short.", "store": False, "max_output_tokens": 9, "metadata": {"a": "b"},
         "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                   {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "sunny"},
                   {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]}],
         "tools": [{"type": "function", **WEATHER}], "tool_choice": {"type": "function", "name": "weather"},
         "text": {"format": {"type": "json_schema", "name": "c", "schema": CITY}}, "reasoning": {"effort": "low"},
         "truncation": "auto", "conversation": "conv_" + "0" * 32,
         "prompt": {"id": "p", "version": "1", "variables": {"a": "b", "c": {"type": "input_text", "text": "d"}}}},
        lambda b: parse_responses(b, LIMITS)),
    "anthropic": (
        {"model": MODEL, "max_tokens": 9, "system": [{"type": "text", "text": "Be short."}], "stop_sequences": ["a"],
         "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                      {"role": "assistant", "content": [
                          {"type": "thinking", "thinking": "so", "signature": ""},
                          {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Paris"}}]},
                      {"role": "user", "content": [
                          {"type": "tool_result", "tool_use_id": "c",
                           "content": [{"type": "text", "text": "sunny"}]}]}],
         "tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "tool", "name": "weather"},
         "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}},
        lambda b: parse_messages_request(b, LIMITS)),
    "count": ({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, lambda b: parse_count(b, LIMITS)),
    "embed": ({"text": ["a", "b"], "pooling": "cls"}, lambda b: parse_embed(b, MODEL)),
    "embed contexts": ({"contexts": [{"text": "a"}], "query": "b", "score_mode": "all", "score_weights": [1, 0, 0]},
                       lambda b: parse_embed(b, MODEL)),
    "rerank": ({"query": "a", "contexts": [{"text": "b"}], "top_k": 1}, lambda b: parse_rerank(b, MODEL)),
    **others.READERS,
}  # fmt: skip

DEEP = "[" * 900 + "]" * 900
NASTY: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63, 2**64, 1e308, -0.0, 0.1, "", "x", "\ud800", "a\x00b", "\u2028", "x" * 5000,
    [], {}, [[]], [{}], [None], {"": ""}, {"type": None}, {"type": "text"}, DEEP, '"\\ud800"', '{"a": ' + DEEP + "}",
    "NaN", "1e999", "١", "<|im_start|>", "<tool_call>", "{}", "[]", [1, "a", None], {"$ref": "#"}, {"type": "function"},
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(NASTY),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def changed(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """JSON of ``body`` with up to three of its values replaced, left out or doubled. What JSON in UTF-8 cannot say is
    escaped.
    """
    found = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        if not (known := list(places(found))):
            break
        *path, last = draw(st.sampled_from(known))
        parent: Any = found
        for key in path:
            parent = parent[key]
        kind = draw(st.integers(0, 9))
        if kind == 0:
            del parent[last]
        elif kind == 1 and isinstance(parent, list):
            parent += [parent[last]] * draw(st.integers(1, 40))
        else:
            parent[last] = copy.deepcopy(draw(VALUES))
    return json.dumps(found).encode()


def read(name: str, body: bytes) -> None:
    """Reads a body as far as a gateway does before it asks a worker; only what a client is told may be raised."""
    try:
        parsed = READERS[name][1](body)
        for request in parsed if isinstance(parsed, list) else [getattr(parsed, "generate", parsed)]:
            if isinstance(request, GenerateRequest):
                prepare(request)
    except ApiError as error:
        assert 400 <= error.status < 500 and str(error), error
        json.dumps(str(error)).encode()


def prepare(request: GenerateRequest) -> None:
    """The prompt's tokens and the answer's grammar."""
    ids = prompt_ids(_tokenizer(), request, context_window=WINDOW)
    request = fit_context(request, len(ids), WINDOW)
    if needs_grammar(request):
        grammar = answer_grammar(request, token=token_rule(_tokenizer()), family="pico")
        replace(request, sampling=replace(request.sampling, grammar=grammar))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(PROJECT_ROOT / "checkpoints" / "pico-instruct")


def read_noise(data: bytes) -> None:
    """Bytes that may be no JSON at all."""
    try:
        assert isinstance(parse_body(data), dict)
    except ApiError as error:
        assert 400 <= error.status < 500


def read_parts(data: bytes, content_type: str) -> None:
    """A body of several parts."""
    with contextlib.suppress(InvalidInput):
        for part in read_multipart(data, content_type):
            assert part.name and isinstance(part.filename, str) and isinstance(part.media_type, str)


@st.composite
def parts(draw: st.DrawFn) -> tuple[bytes, str]:
    """A right body of several parts, some of its bytes changed, and its content type."""
    fields = st.builds(
        BodyPart, st.text(min_size=1, max_size=5), st.binary(max_size=20), filename=st.text(max_size=5),
        media_type=st.sampled_from(["text/plain", "image/png", "text", "a/b; c=d", "multipart/mixed; boundary=x"]),
    )  # fmt: skip
    data, kind = write_multipart(draw(st.lists(fields, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    header = st.one_of(
        st.just(kind), st.text(st.characters(max_codepoint=255), max_size=40).map(f"{kind[:31]}".__add__)
    )
    return data, draw(header)
