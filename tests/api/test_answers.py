"""Answers, plain and streamed, as real clients read them; and errors."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from openai import APIError, AsyncOpenAI
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve_app.api import sse
from serve_app.api.anthropic.write import error_body as anthropic_body
from serve_app.api.collect import merge
from serve_app.api.envelopes import envelope, openai_body, status_of
from serve_app.api.errors import ContextTooLong, InputTooLong, ModelNotStarted, OutOfCapacity, UnknownModel
from serve_app.api.multi_vector import Reading
from serve_app.api.openai import read as openai
from serve_app.api.openai import write as openai_answers
from serve_app.api.types import ChoiceDone, Event, TextDelta, TokenLogprob, ToolCallDelta, Usage
from serve_app.tasks.reranking.read import parse_rerank
from serve_app.tasks.reranking.write import render_rerank
from serve_app.tasks.text_embeddings.read import parse_embed
from serve_app.tasks.text_embeddings.write import render_embed
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_generation.write import render_generate, stream_generate
from tests.api.clients import MODEL, client, cloudflare

USAGE = Usage(prompt_tokens=21, completion_tokens=3, cached_tokens=16, micro_neurons=250_000)
TEXT: list[Event] = [TextDelta(0, "Li", (1,)), TextDelta(0, "ma.", (2, 3)), ChoiceDone(0, "stop"), USAGE]
CALLS: list[Event] = [
    ToolCallDelta(0, 0, "call_1", "add", '{"a": 1}'),
    ToolCallDelta(0, 1, "call_2", "add", '{"a": 2}'),
    ChoiceDone(0, "tool_calls"),
    USAGE,
]
LOGPROB = TokenLogprob("Li", 1, -0.5, [("Li", 1, -0.5), ("Ro", 9, -1.5)])


async def stream(events: list[Event], fail: Exception | None = None) -> AsyncIterator[Event]:
    for event in events:
        await asyncio.sleep(0)
        yield event
    if fail is not None:
        raise fail


async def frames(source: AsyncIterator[bytes]) -> list[Any]:
    data = b"".join([frame async for frame in source])
    assert data.endswith(b"\n\n")
    lines = [line for line in data.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_native_answer():
    request = parse_generate({"prompt": "x"}, MODEL)
    body = render_generate(request, TEXT)
    result = body["result"]
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    assert (result["response"], result["tool_calls"], result["finish_reason"]) == ("Lima.", [], "stop")
    assert result["usage"] == {
        "prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0}, "neurons": 0.25,
    }  # fmt: skip
    assert result["choices"][0]["message"]["content"] == "Lima."
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=body))) as http:
        assert cloudflare(http).ai.run(MODEL, account_id="local", prompt="x")["response"] == "Lima."


def test_native_tool_calls():
    request = parse_generate({"prompt": "x"}, MODEL)
    result = render_generate(request, CALLS)["result"]
    assert [(c["index"], c["name"], c["arguments"]) for c in result["tool_calls"]] == [
        (0, "add", {"a": 1}),
        (1, "add", {"a": 2}),
    ]
    assert result["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert result["finish_reason"] == "tool_calls" and result["choices"][0]["message"]["content"] is None


async def test_native_stream():
    request = parse_generate({"prompt": "x", "stream": True}, MODEL)
    found = await frames(stream_generate(request, stream(TEXT)))
    assert [frame["response"] for frame in found[:2]] == ["Li", "ma."]
    assert all("choices" not in frame and set(frame) == {"response", "p"} for frame in found[:2])
    assert found[2]["response"] == "" and found[2]["finish_reason"] == "stop"
    assert found[2]["usage"]["total_tokens"] == 24 and found[3:] == ["[DONE]"]
    called = await frames(stream_generate(request, stream(CALLS)))
    assert [frame["tool_calls"][0]["index"] for frame in called[:2]] == [0, 1]
    assert called[2]["finish_reason"] == "tool_calls"


async def test_native_frames_of_short_tokens_have_one_size():
    request = parse_generate({"prompt": "x", "stream": True}, MODEL)
    events: list[Event] = [TextDelta(0, text) for text in ("a", "abc", "é", '"', "\n", "a longer word")]
    sizes = {len(frame) async for frame in stream_generate(request, stream(events)) if b'"p"' in frame}
    assert len(sizes) == 1


async def test_openai_chat_answers_parse_and_stream():
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    request = openai.parse_chat({**body, "stream": True, "stream_options": {"include_usage": True}})
    events: list[Event] = [
        TextDelta(1, "Ro"), TextDelta(0, "Li", (1,), [LOGPROB]), ChoiceDone(1, "length"), TextDelta(0, "ma"),
        ToolCallDelta(0, 0, "call_1", "add", "{}"), ChoiceDone(0, "tool_calls"), USAGE,
    ]  # fmt: skip
    whole = ChatCompletion.model_validate(openai_answers.render_chat(request, events), strict=True)
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "length"]
    assert whole.choices[0].message.content == "Lima" and whole.choices[1].message.content == "Ro"
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    assert [top.token for top in whole.choices[0].logprobs.content[0].top_logprobs] == ["Li", "Ro"]
    assert whole.usage and whole.usage.prompt_tokens_details and whole.usage.prompt_tokens_details.cached_tokens == 16

    data = b"".join([frame async for frame in openai_answers.stream_chat(request, stream(events))])

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=data, headers=sse.HEADERS)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
        sdk = AsyncOpenAI(api_key="t", base_url="http://localhost/v1", http_client=http)
        chunks = [
            c async for c in await sdk.chat.completions.create(model=MODEL, messages=body["messages"], stream=True)
        ]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    text = {i: "".join(c.delta.content or "" for k in chunks for c in k.choices if c.index == i) for i in (0, 1)}
    assert text == {0: "Lima", 1: "Ro"}
    assert {c.index: c.finish_reason for k in chunks for c in k.choices if c.finish_reason} == {
        0: "tool_calls",
        1: "length",
    }
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.total_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"


async def test_completions_answers():
    requests = openai.parse_completions({"model": MODEL, "prompt": ["a", "b"], "logprobs": 2, "stream": True})
    streams = [stream([TextDelta(0, "Li", (1,), [LOGPROB]), ChoiceDone(0, "stop"), USAGE]) for _ in requests]
    events = [event async for event in merge(streams, requests[0].n)]
    assert events[-1] == Usage(42, 6, 32, micro_neurons=500_000)
    whole = Completion.model_validate(openai_answers.render_completion(requests, events), strict=True)
    assert [(c.index, c.text, c.finish_reason) for c in whole.choices] == [
        (0, "Li", "stop"),
        (1, "Li", "stop"),
    ]
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.text_offset == [0]
    echo = openai.parse_completions({"model": MODEL, "prompt": ["a", "b"], "echo": True})
    found = await frames(openai_answers.stream_completion(echo, stream(events)))
    texts = ["".join(c["text"] for f in found[:-1] for c in f["choices"] if c["index"] == i) for i in (0, 1)]
    assert texts == ["aLi", "bLi"] and found[-1] == "[DONE]"


async def test_merge_closes_every_stream_when_one_fails_or_the_reader_leaves():
    closed: list[int] = []

    async def source(number: int, fail: bool) -> AsyncIterator[Event]:
        try:
            yield TextDelta(0, "x")
            if fail:
                raise OutOfCapacity
            await asyncio.Event().wait()
        finally:
            closed.append(number)

    with pytest.raises(OutOfCapacity):
        async for _ in merge([source(0, False), source(1, True)]):
            pass
    assert sorted(closed) == [0, 1]
    closed.clear()
    left = merge([source(0, False), source(1, False)])
    await anext(left)
    await anext(left)
    await left.aclose()
    assert sorted(closed) == [0, 1]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_embeddings(encoding):
    vectors = np.array([[0.5, -1.0], [2.0, 0.25]], dtype=np.float64)

    def handle(request: httpx.Request) -> httpx.Response:
        parsed = openai.parse_embeddings(request.content)
        return httpx.Response(200, content=orjson.dumps(openai_answers.render_embeddings(parsed, vectors, USAGE)))

    with httpx.Client(transport=httpx.MockTransport(handle)) as http:
        # The SDK asks for base64 by itself and decodes it.
        answer = client(http).embeddings.create(model=MODEL, input=["a", "b"])
    assert [item.embedding for item in answer.data] == vectors.tolist()
    parsed = openai.parse_embeddings({"model": MODEL, "input": "a", "encoding_format": encoding})
    body = openai_answers.render_embeddings(parsed, vectors, USAGE)
    if encoding == "float":
        CreateEmbeddingResponse.model_validate(body, strict=True)
    else:
        assert base64.b64decode(body["data"][0]["embedding"]) == vectors[0].astype("<f4").tobytes()


def test_native_embeddings_and_rerank():
    vectors = np.ones((2, 3))
    body = render_embed(parse_embed({"text": ["a", "b"]}, MODEL), Reading(vectors), USAGE)["result"]
    assert (body["shape"], body["data"], body["pooling"]) == ([2, 3], vectors.tolist(), "mean")
    ranked = parse_rerank({"query": "q", "contexts": [{"text": t} for t in "abc"], "top_k": 2}, MODEL)
    body = render_rerank(ranked, [0.1, 0.9, 0.5], USAGE)["result"]
    assert body["response"] == [{"id": 1, "score": 0.9}, {"id": 2, "score": 0.5}]
    assert body["usage"]["total_tokens"] == 21


# -- errors ---------------------------------------------------------------------------------------------


async def test_an_error_in_a_stream_is_its_last_frame_and_leaks_nothing():
    native = parse_generate({"prompt": "x", "stream": True}, MODEL)
    chat = openai.parse_chat({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
    secret = RuntimeError("at 0x7f0000 in /home/me")
    found = await frames(stream_generate(native, stream(TEXT[:1], secret)))
    assert found[-1]["errors"][0]["code"] == 8005 and "0x7f" not in str(found)
    found = await frames(stream_generate(native, stream(TEXT[:1], OutOfCapacity())))
    assert found[-1]["errors"][0]["code"] == 3040
    data = b"".join([f async for f in openai_answers.stream_chat(chat, stream(TEXT[:1], secret))])
    assert b"0x7f" not in data
    with (
        httpx.Client(
            transport=httpx.MockTransport(lambda _: httpx.Response(200, content=data, headers=sse.HEADERS))
        ) as http,
        pytest.raises(APIError, match="Internal server error"),
    ):
        for _ in client(http).chat.completions.create(model=MODEL, messages=[], stream=True):
            pass


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnknownModel("@cf/x"), 400, 5007),
        (ContextTooLong(9, 9, 9), 413, 5021),
        (OutOfCapacity(retry_after=0.2), 429, 3040),
    ],
)
def test_error_bodies(error, status, code):
    body = envelope(error)
    assert (error.status, body["errors"][0]["code"], body["result"], body["success"]) == (status, code, {}, False)
    assert error.headers.get("Retry-After") == ("1" if status == 429 else None)
    body = openai_body(error)
    assert body["error"]["message"] == body["errors"][0]["message"] and body["errors"][0]["code"] == code
    assert body["error"]["code"] == (error.name or str(code))


def test_the_fields_words_for_errors_that_clients_look_for():
    for error in (UnknownModel("m"), ModelNotStarted("m", "")):
        assert status_of(error, native=False) == 404 and status_of(error, native=True) == 400
        assert openai_body(error)["error"]["code"] == "model_not_found"
        assert anthropic_body(error)["error"]["type"] == "not_found_error"
    for long in (ContextTooLong(9, 9, 9), InputTooLong("too long")):
        assert status_of(long, native=False) == 400 and status_of(long, native=True) == 413
        found = openai_body(long)["error"]
        assert (found["code"], found["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert anthropic_body(long)["error"]["type"] == "invalid_request_error"
    assert status_of(OutOfCapacity(), native=False) == 429


async def test_usage_so_far_in_every_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": MODEL, "stream": True, "stream_options": options}
    chat = openai.parse_chat({**asked, "messages": [{"role": "user", "content": "x"}]})
    [text] = openai.parse_completions({**asked, "prompt": "x"})
    assert chat.continuous_usage and text.continuous_usage
    events: list[Event] = [
        Usage(21, 1, final=False),
        TextDelta(0, "Li", (1,)),
        Usage(21, 3, final=False),
        TextDelta(0, "ma.", (2, 3)),
        ChoiceDone(0, "stop"),
        USAGE,
    ]
    for streamed, expected in (
        (openai_answers.stream_chat(chat, stream(events)), [0, 1, 3, 3]),
        (openai_answers.stream_completion([text], stream(events)), [1, 3, 3]),
    ):
        told = [chunk for chunk in await frames(streamed) if chunk != "[DONE]" and chunk["choices"]]
        assert [c["usage"]["completion_tokens"] for c in told] == expected
        assert {c["usage"]["prompt_tokens"] for c in told} == {21}
    plain = openai.parse_chat({**asked, "messages": [{"role": "user", "content": "x"}], "stream_options": {}})
    assert not plain.include_usage and not plain.continuous_usage


async def test_usage_so_far_of_several_prompts_adds_up():
    def one() -> list[Event]:
        return [
            Usage(5, 1, final=False),
            TextDelta(0, "a"),
            Usage(5, 2),
        ]

    found = [e async for e in merge([stream(one()), stream(one())])]
    running = [e for e in found if isinstance(e, Usage) and not e.final]
    assert (running[-1].prompt_tokens, running[-1].completion_tokens) == (10, 2)
    assert found[-1] == Usage(10, 4) and sum(isinstance(e, TextDelta) for e in found) == 2


def test_the_sampled_token_is_among_the_legacy_alternatives():
    item = TokenLogprob("No", 7, -4.5, [("Li", 1, -0.5)])
    asked = openai.parse_completions({"model": MODEL, "prompt": "x", "logprobs": 1})
    events: list[Event] = [TextDelta(0, "No", (7,), [item]), ChoiceDone(0, "stop"), USAGE]
    body = openai_answers.render_completion(asked, events)
    found = Completion.model_validate(body, strict=True).choices[0].logprobs
    assert found is not None and found.top_logprobs == [{"Li": -0.5, "No": -4.5}]


def test_a_context_that_is_too_long_blames_max_tokens_only_where_it_was_sent():
    assert "max_tokens is 50" in ContextTooLong(60, 50, 100).message
    for error in (ContextTooLong(100, None, 100), ContextTooLong(200, 50, 100)):
        assert "max_tokens" not in error.message
        assert "prompt is too long" in error.message and "maximum context length" in error.message
