"""Bad input, one line each: refused with the right code, and with a message that names the field or says what
to do."""

from __future__ import annotations

import orjson
import pytest

from serve_app.api.errors import ApiError, BodyTooLarge, InvalidInput, LoraUnsupported, MissingBody, Timeout
from serve_app.api.fields.body import DEPTH_LIMIT, as_object, check_object, parse_body, read_bounded
from serve_app.api.openai import read as openai
from serve_app.api.types import ModelLimits
from serve_app.api.workers_ai import read as workers_ai
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_generation.read import parse_generate

LIMITS = ModelLimits(context_window=1024, vocab_size=1000)
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "parameters": {}}

BODIES = [
    (b"", MissingBody, "Send a JSON object"),
    (b" \n\t ", MissingBody, "Send a JSON object"),
    (b"\xef\xbb\xbf", MissingBody, "Send a JSON object"),
    (b"{", InvalidInput, "not valid JSON"),
    (b'{"prompt": "x"', InvalidInput, "not valid JSON"),
    (b"{'prompt': 'x'}", InvalidInput, "not valid JSON"),
    (b'{"prompt": "x"} trailing', InvalidInput, "not valid JSON"),
    (b"prompt=x", InvalidInput, "not valid JSON"),
    (b"[]", InvalidInput, "an array"),
    (b'"text"', InvalidInput, "a string"),
    (b"null", InvalidInput, "null"),
    (b"42", InvalidInput, "a number"),
    (b"true", InvalidInput, "a boolean"),
    (b'{"temperature": NaN}', InvalidInput, "not valid JSON"),
    (b'{"temperature": Infinity}', InvalidInput, "not valid JSON"),
    (b'{"temperature": 1e309}', InvalidInput, "not valid JSON"),
    (b'{"temperature": -1e309}', InvalidInput, "not valid JSON"),
    (b'{"prompt": "\xff"}', InvalidInput, "UTF-8"),
    (b'{"prompt": "\\ud800"}', InvalidInput, "surrogate"),
    (b'{"prompt": "a\x00b"}', InvalidInput, "not valid JSON"),
    ('{"prompt": "x"}'.encode("utf-16"), InvalidInput, "UTF-8|not valid"),
    (b"\x89PNG\r\n\x1a\n", InvalidInput, "not valid JSON"),
    (b'{"a":' * 100 + b"1" + b"}" * 100, InvalidInput, "nested deeper"),
    (b"[" * 100_000, InvalidInput, "not valid JSON"),
    (b'{"prompt": "' + b"x" * 1000 + b'"}', BodyTooLarge, "larger than"),
]


@pytest.mark.parametrize(("data", "kind", "words"), BODIES)
def test_bodies_that_are_no_json_object(data, kind, words):
    limit = 500 if kind is BodyTooLarge else 10**6
    with pytest.raises(kind, match=words) as caught:
        parse_body(data, limit=limit)
    assert 400 <= caught.value.status < 500


@pytest.mark.parametrize(
    "value",
    [{"a": float("nan")}, {"a": [1, [float("inf")]]}, {"a": "\ud800"}, {"\udfff": 1}, {1: 2}, [1], "x", None],
)
def test_objects_from_python_are_checked_alike(value):
    with pytest.raises(InvalidInput):
        check_object(value)


def test_depth_and_labels():
    nested: object = "x"
    for _ in range(DEPTH_LIMIT - 1):
        nested = [nested]
    assert check_object({"a": nested}) == {"a": nested}
    with pytest.raises(InvalidInput):
        check_object({"a": [nested]})
    assert as_object(b'\xef\xbb\xbf {"prompt": "x", "prompt": "y"}') == {"prompt": "y"}


GENERATE = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": None, "messages": None}, "prompt"),
    ({"prompt": 5}, "prompt must be a string"),
    ({"prompt": ["x"]}, "prompt must be a string"),
    ({"prompt": "x", "messages": MESSAGES}, "exclude each other"),
    ({"messages": []}, "at least one"),
    ({"messages": "hi"}, "messages must be an array"),
    ({"messages": {"role": "user"}}, "messages must be an array"),
    ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\].role must be one of"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, '"wizard"'),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "an array"),
    ({"messages": [{"role": "USER", "content": "x"}]}, '"USER"'),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "a string or an array of content parts"),
    ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "a string or an array of content parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text must be a string"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "must be an object"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "only assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "name must be a string"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]}]}, "arguments"),
    ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "must be an array"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "tool_call_id must be a string"),
    ({"messages": MESSAGES * 4097}, "at most 4096"),
    ({"prompt": "x", "stream": "true"}, "stream must be true or false"),
    ({"prompt": "x", "stream": 1}, "stream must be true or false"),
    ({"prompt": "x", "raw": "yes"}, "raw must be true or false"),
    ({"prompt": "x", "max_tokens": 0}, "between 1 and"),
    ({"prompt": "x", "max_tokens": -5}, "between 1 and"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens must be an integer"),
    ({"prompt": "x", "max_tokens": "256"}, "leave out the quotes"),
    ({"prompt": "x", "max_tokens": True}, "a boolean"),
    ({"prompt": "x", "max_tokens": 10**30}, "between 1 and"),
    ({"prompt": "x", "max_tokens": [1]}, "an array"),
    ({"prompt": "x", "temperature": -0.1}, "temperature must be between 0 and 5"),
    ({"prompt": "x", "temperature": 5.1}, "temperature must be between 0 and 5"),
    ({"prompt": "x", "temperature": "0.7"}, "leave out the quotes"),
    ({"prompt": "x", "temperature": "warm"}, "temperature must be a number"),
    ({"prompt": "x", "temperature": False}, "a boolean"),
    ({"prompt": "x", "top_p": -0.5}, "top_p"),
    ({"prompt": "x", "top_p": 2.5}, "top_p"),
    ({"prompt": "x", "top_k": -1}, "top_k"),
    ({"prompt": "x", "top_k": 2.5}, "top_k"),
    ({"prompt": "x", "min_p": 1.5}, "min_p"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "repetition_penalty": -1}, "repetition_penalty"),
    ({"prompt": "x", "repetition_penalty": 3}, "repetition_penalty"),
    ({"prompt": "x", "frequency_penalty": 2.1}, "frequency_penalty"),
    ({"prompt": "x", "presence_penalty": -2.1}, "presence_penalty"),
    ({"prompt": "x", "n": 0}, "n must be"),
    ({"prompt": "x", "n": 129}, "between 1 and 128"),
    ({"prompt": "x", "n": 10**9}, "between 1 and 128"),
    ({"prompt": "x", "best_of": 5}, "best_of"),
    ({"prompt": "x", "stop": ""}, "empty string"),
    ({"prompt": "x", "stop": ["a", ""]}, "empty string"),
    ({"prompt": "x", "stop": ["a"] * 17}, "at most 16"),
    ({"prompt": "x", "stop": ["a"] * 1_000_000}, "at most 16"),
    ({"prompt": "x", "stop": "a" * 257}, "at most 256"),
    ({"prompt": "x", "stop": 7}, "stop must be"),
    ({"prompt": "x", "stop": [None]}, "stop must be a string"),
    ({"prompt": "x", "stop": {"a": 1}}, "stop must be"),
    ({"prompt": "x", "logit_bias": {"1000": 1}}, "from 0 to 999"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "token ids"),
    ({"prompt": "x", "logit_bias": {"cat": 1}}, "token ids"),
    ({"prompt": "x", "logit_bias": {"\u0661": 1}}, "token ids"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "between -100 and 100"),
    ({"prompt": "x", "logit_bias": {"5": "1"}}, "must be a number"),
    ({"prompt": "x", "logit_bias": {"5": None}}, "must be a number"),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias must be an object"),
    ({"prompt": "x", "logit_bias": {str(i): 0 for i in range(1025)}}, "at most 1024"),
    ({"prompt": "x", "logprobs": 5}, "logprobs must be true or false"),
    ({"prompt": "x", "top_logprobs": 3}, "needs logprobs"),
    ({"prompt": "x", "logprobs": True, "top_logprobs": 21}, "between 0 and 20"),
    ({"prompt": "x", "logprobs": True, "top_logprobs": -1}, "between 0 and 20"),
    ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "x", "stop_token_ids": [1000]}, "from 0 to 999"),
    ({"prompt": "x", "stop_token_ids": [True]}, "integers"),
    ({"prompt": "x", "stop_token_ids": 5}, "an array of token ids"),
    ({"prompt": "x", "tools": "add"}, "tools must be an array"),
    ({"prompt": "x", "tools": [{}]}, r"tools\[0\].name"),
    ({"prompt": "x", "tools": [{"name": "two words"}]}, "letters, digits"),
    ({"prompt": "x", "tools": [{"type": "custom", "name": "f"}]}, "other tools are not supported"),
    ({"prompt": "x", "tools": [{"type": "function", "function": "f"}]}, "function must be an object"),
    ({"prompt": "x", "tools": [{"name": "f", "parameters": []}]}, "JSON schema"),
    ({"prompt": "x", "tools": [TOOL] * 129}, "at most 128"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "function"}}, "name of one of the tools"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "function", "function": 1}}, "name of one of the tools"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "none of the tools"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "at least one tool"),
    ({"prompt": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "allowed_tools must be"),
    ({"prompt": "x", "tool_choice": {"type": "function", "name": "f"}}, "no tools"),
    ({"prompt": "x", "tool_choice": "required"}, "no tools"),
    ({"prompt": "x", "tool_choice": "sometimes"}, "tool_choice must be"),
    ({"prompt": "x", "tool_choice": 1}, "tool_choice must be"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "has no schema"),
    ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": []}}, "JSON schema"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type must be"),
    ({"prompt": "x", "response_format": "json"}, "response_format must be"),
    ({"prompt": "x", "guided_json": "{"}, "guided_json can't be read as JSON"),
    ({"prompt": "x", "guided_json": '{"const": "\\ud800"}'}, "guided_json can't be read as JSON"),
    ({"prompt": "x", "guided_json": '{"const":' * 900 + "1" + "}" * 900}, "nested deeper than 128"),
    ({"prompt": "x", "guided_json": 5}, "JSON schema"),
    ({"prompt": "x", "guided_regex": 5}, "guided_regex must be a string"),
    ({"prompt": "x", "guided_regex": "a" * 65537}, "at most 65536"),
    ({"prompt": "x", "guided_choice": []}, "1 to 1024"),
    ({"prompt": "x", "guided_choice": ["a", ""]}, "empty string"),
    ({"prompt": "x", "guided_choice": ["a", 1]}, "guided_choice.1. must be a string"),
    ({"prompt": "x", "guided_choice": "a"}, "array of strings"),
    ({"prompt": "x", "guided_grammar": {}}, "guided_grammar must be a string"),
    ({"prompt": "x", "guided_choice": ["a"], "guided_regex": "a"}, "exclude each other"),
    ({"prompt": "x", "guided_json": {}, "response_format": {"type": "json_object"}}, "exclude each other"),
    ({"prompt": "x", "structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
    ({"prompt": "x", "structured_outputs": {"json_object": 1}}, "json_object must be"),
    ({"prompt": "x", "structured_outputs": []}, "structured_outputs must be"),
    ({"prompt": "x", "image": [1, 2, 3]}, "image"),
    ({"prompt": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"prompt": "x", "chat_template_kwargs": {"tools": True}}, "nothing else"),
    ({"prompt": "x", "chat_template_kwargs": {"enable_thinking": "x"}}, "nothing else"),
    ({"prompt": "x", "chat_template_kwargs": {"reasoning_effort": "very"}}, "nothing else"),
    ({"prompt": "x", "reasoning_effort": "very"}, "reasoning_effort must be"),
    ({"prompt": "x", "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"prompt": "x", "options": {"deadlineMs": "soon"}}, "deadlineMs"),
    ({"prompt": "x", "functions": [{"name": "f", "code": "x"}]}, "send tools instead"),
    ({"prompt": "x", "modalities": ["audio"]}, "modalities"),
    ({"prompt": "x", "options": "fast"}, "options must be an object"),
    ({"prompt": "x", "options": {"rejectIfBusy": "yes"}}, "rejectIfBusy"),
    ({"requests": [{"prompt": "x"}]}, "belongs to batches"),
    ({"prompt": "", "request_id": "1"}, "belongs to batches"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), GENERATE)
def test_text_generation(body, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        parse_generate(body, "@cf/a/b", LIMITS)
    assert (caught.value.code, caught.value.status) == (5006, 400)
    assert len(caught.value.message) < 400


NATIVE_ONLY = {"raw", "options", "tool_choice", "best_of", "requests", "request_id"}
CHAT = [
    row for row in GENERATE if ("messages" in row[0] or row[0].get("prompt") == "x") and not NATIVE_ONLY & set(row[0])
]


@pytest.mark.parametrize(
    ("body", "words"), [row for row in CHAT if "exclude" not in row[1] and row[0] != GENERATE[2][0]]
)
def test_chat_completions_refuse_the_same(body, words):
    fields = {name: value for name, value in body.items() if name != "prompt"}
    with pytest.raises(InvalidInput, match=words):
        openai.parse_chat({"model": "m", "messages": MESSAGES, **fields}, LIMITS)


OTHER = [
    (openai.parse_chat, {"messages": MESSAGES}, "model is missing"),
    (openai.parse_chat, {"model": 3, "messages": MESSAGES}, "model must be a string"),
    (openai.parse_chat, {"model": "x" * 600, "messages": MESSAGES}, "at most 512"),
    (openai.parse_chat, {"model": "m"}, "messages is missing"),
    (openai.parse_chat, {"model": "m", "messages": MESSAGES, "stream_options": True}, "stream_options"),
    (
        openai.parse_chat,
        {"model": "m", "messages": MESSAGES, "stream_options": {"include_usage": 1}},
        "include_usage",
    ),
    (
        openai.parse_chat,
        {"model": "m", "messages": MESSAGES, "max_completion_tokens": 0},
        "max_completion_tokens",
    ),
    (openai.parse_completions, {"model": "m", "prompt": ["a"] * 65, "n": 2}, "at most 128"),
    (openai.parse_completions, {"model": "m"}, "prompt is missing"),
    (openai.parse_completions, {"model": "m", "prompt": []}, "prompt is missing"),
    (openai.parse_completions, {"model": "m", "prompt": ["a", ""]}, "empty string"),
    (openai.parse_completions, {"model": "m", "prompt": ["a", 1]}, r"prompt\[1\]"),
    (openai.parse_completions, {"model": "m", "prompt": [1, "a"]}, "integers"),
    (openai.parse_completions, {"model": "m", "prompt": [1, -1]}, "out of vocabulary"),
    (openai.parse_completions, {"model": "m", "prompt": [[1], []]}, "empty array"),
    (openai.parse_completions, {"model": "m", "prompt": [10**10]}, "out of vocabulary"),
    (openai.parse_completions, {"model": "m", "prompt": ["a"] * 129}, "at most 128"),
    (openai.parse_completions, {"model": "m", "prompt": "a", "logprobs": 21}, "logprobs"),
    (openai.parse_completions, {"model": "m", "prompt": "a", "suffix": "b"}, "suffix"),
    (openai.parse_completions, {"model": "m", "prompt": "a", "max_tokens": 0}, "max_tokens"),
    (openai.parse_embeddings, {"model": "m"}, "input is missing"),
    (openai.parse_embeddings, {"model": "m", "input": ""}, "empty"),
    (openai.parse_embeddings, {"model": "m", "input": []}, "empty"),
    (openai.parse_embeddings, {"model": "m", "input": [1, -2]}, "token ids"),
    (openai.parse_embeddings, {"model": "m", "input": [[1], []]}, "empty array"),
    (openai.parse_embeddings, {"model": "m", "input": [[1], "a"]}, "token ids"),
    (openai.parse_embeddings, {"model": "m", "input": "a", "truncate": "MIDDLE"}, "truncate"),
    (openai.parse_embeddings, {"model": "m", "input": "a", "truncate_prompt_tokens": 0}, "at least 1"),
    (openai.parse_embeddings, {"model": "m", "input": "a", "truncation_side": "up"}, "left"),
    (openai.parse_embeddings, {"model": "m", "input": ["a", None]}, r"input\[1\]"),
    (openai.parse_embeddings, {"model": "m", "input": "a", "encoding_format": "hex"}, "encoding_format"),
    (openai.parse_embeddings, {"model": "m", "input": "a", "dimensions": 0}, "dimensions"),
]
NATIVE = [
    (parse_embed, {}, "text"),
    (parse_embed, {"text": ""}, "empty"),
    (parse_embed, {"text": []}, "empty"),
    (parse_embed, {"text": ["a", ""]}, "empty"),
    (parse_embed, {"text": 4}, "text must be"),
    (parse_embed, {"text": ["a", 4]}, r"text\[1\]"),
    (parse_embed, {"text": ["a"] * 4097}, "at most 4096"),
    (parse_embed, {"text": "a", "pooling": "max"}, '"mean", "cls"'),
    (parse_embed, {"text": "", "requests": [{"text": "a"}]}, "belongs to batches"),
    (parse_rerank, {"contexts": [{"text": "a"}]}, "query"),
    (parse_rerank, {"query": "", "contexts": [{"text": "a"}]}, "query"),
    (parse_rerank, {"query": "q"}, "contexts"),
    (parse_rerank, {"query": "q", "contexts": []}, "at least one"),
    (parse_rerank, {"query": "q", "contexts": ["a"]}, r"contexts\[0\] must be an object"),
    (parse_rerank, {"query": "q", "contexts": [{}]}, r"contexts\[0\].text"),
    (parse_rerank, {"query": "q", "contexts": [{"text": "a"}] * 10_001}, "at most"),
    (parse_rerank, {"query": "q", "contexts": [{"text": "a"}], "top_k": 0}, "top_k"),
    (parse_rerank, {"query": "q", "contexts": [{"text": "a"}], "top_k": "2"}, "quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "body", "words"), OTHER)
def test_other_openai_routes(parse, body, words):
    with pytest.raises(ApiError, match=words) as caught:
        parse(orjson.dumps(body))
    assert caught.value.status == 400


@pytest.mark.parametrize(("parse", "body", "words"), NATIVE)
def test_other_native_tasks(parse, body, words):
    with pytest.raises(InvalidInput, match=words):
        parse(orjson.dumps(body), "@cf/a/b")


def test_adapters_and_batches_are_refused_by_their_codes():
    with pytest.raises(LoraUnsupported) as caught:
        parse_generate({"prompt": "x", "lora": "mine"}, "@cf/a/b", LIMITS)
    assert (caught.value.code, caught.value.status) == (5005, 405)
    for name in ("requests", "request_id"):
        with pytest.raises(InvalidInput, match=name):
            parse_generate({"prompt": "x", name: "x"}, "@cf/a/b", LIMITS)
    for body in ({}, {"model": "m"}, {"model": "m", "input": "x"}, {"input": {}}):
        with pytest.raises(InvalidInput):
            workers_ai.parse_run_target(body)


async def test_bodies_are_read_within_bounds():
    read: list[int] = []

    async def chunks(count: int, size: int):
        for i in range(count):
            read.append(i)
            yield b"x" * size

    assert await read_bounded(chunks(3, 2), limit=6) == b"xxxxxx"
    read.clear()
    with pytest.raises(BodyTooLarge):
        await read_bounded(chunks(1000, 2), limit=6)
    assert len(read) == 4
    read.clear()
    with pytest.raises(BodyTooLarge):
        await read_bounded(chunks(3, 2), "7", limit=6)
    assert not read

    async def never():
        import asyncio

        await asyncio.Event().wait()
        yield b""

    with pytest.raises(Timeout):
        await read_bounded(never(), timeout=0.01)
