"""The Anthropic dialect, read and written by its unmodified client."""

from __future__ import annotations

from typing import Any

import anthropic as sdk
import httpx2
import pytest
from anthropic.types import Message

from serve_app.api import listing as models
from serve_app.api.anthropic import read as anthropic
from serve_app.api.anthropic import write as anthropic_answers
from serve_app.api.errors import (
    AccountForbidden,
    ApiError,
    AuthError,
    BodyTooLarge,
    InvalidInput,
    ModelLoading,
    NotFound,
    OutOfCapacity,
)
from serve_app.api.fields.content import content_text
from serve_app.api.types import ChoiceDone, Event, ModelLimits, TextDelta, ToolCallDelta, Usage
from tests.api.clients import MODEL
from tests.api.test_answers import stream

ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
USAGE = Usage(prompt_tokens=21, completion_tokens=3, cached_tokens=16, micro_neurons=250_000)
EVENTS: list[Event] = [
    TextDelta(0, "Li"),
    TextDelta(0, "ma."),
    ToolCallDelta(0, 0, "call_1", "add", '{"a": 1}'),
    ToolCallDelta(0, 1, "call_2", "add", "{}"),
    ChoiceDone(0, "tool_calls"),
    USAGE,
]


def client(answer: httpx2.Response, seen: list[httpx2.Request] | None = None) -> sdk.Anthropic:
    """A client whose transport is ours, so that nothing leaves the process."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if seen is not None:
            seen.append(request)
        return answer

    http = httpx2.Client(transport=httpx2.MockTransport(handle))
    return sdk.Anthropic(api_key="t", base_url="http://localhost", http_client=http, max_retries=0)


def parse(**fields: Any):
    """What the SDK sends for ``messages.create(**fields)``, as our request."""
    asked = {"model": MODEL, "max_tokens": 9, "messages": ASK, **fields}
    request = anthropic.parse_messages_request({"model": MODEL, "max_tokens": 9, "messages": ASK})
    whole = anthropic_answers.render_message(request, [ChoiceDone(0, "stop"), USAGE])
    seen: list[httpx2.Request] = []
    client(httpx2.Response(200, json=whole), seen).messages.create(**asked)
    return anthropic.parse_messages_request(seen[0].content, ModelLimits(temperature=0.5))


def test_a_last_assistant_message_goes_on():
    prefilled = parse(messages=[*ASK, {"role": "assistant", "content": "The answer is"}])
    assert prefilled.template_kwargs["continue_final_message"] and prefilled.messages[-1]["role"] == "assistant"
    assert "continue_final_message" not in parse().template_kwargs
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    assert (
        "continue_final_message" not in parse(messages=[*ASK, {"role": "assistant", "content": [call]}]).template_kwargs
    )


def test_turns_of_one_role_in_a_row_are_one():
    said = [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "c", "name": "add", "input": {}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
    found = parse(
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result]},
            {"role": "user", "content": "c"},
        ]
    ).messages
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "user"]
    assert [content_text(m["content"]) for m in found] == ["a\nb", "a\nb", "2", "c"]
    assert len(found[1]["tool_calls"]) == 1


def test_no_tokens_at_all_fill_the_cache():
    found = parse(max_tokens=0)
    assert found.prompt_only and found.sampling.max_tokens == 1 and not parse().prompt_only
    body = anthropic_answers.render_message(found, [ChoiceDone(0, "length"), Usage(prompt_tokens=21)])
    read = Message.model_validate(body, strict=True)
    assert (read.stop_reason, read.content, read.usage.output_tokens) == ("max_tokens", [], 0)
    for wrong in (False, -1):
        with pytest.raises(InvalidInput, match="max_tokens"):
            anthropic.parse_messages_request({"model": MODEL, "max_tokens": wrong, "messages": ASK})


def test_what_the_client_sends():
    found = parse(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        extra_body={"temperature": 0.2, "top_k": 5, "top_p": 0.9, "context_management": None, "betas": ["x"]},
    )
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert found.messages == [system, {"role": "user", "content": "hi"}]
    sampling = found.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (9, 0.2, 5, 0.9)
    assert found.stop == ("END",) and found.tool_choice == "auto" and not found.max_tokens_given
    assert found.tools and found.tools[0]["function"]["parameters"] == TOOL["input_schema"]
    assert found.template_kwargs == {"enable_thinking": False, "thinking": False} and not found.show_reasoning
    assert not found.parallel_tool_calls
    asked = parse(thinking={"type": "enabled", "budget_tokens": 1024})
    assert asked.template_kwargs["enable_thinking"] and asked.show_reasoning and asked.parallel_tool_calls
    assert not parse().show_reasoning
    assert parse().sampling.temperature == 0.5


def test_a_conversation_with_tools():
    found = parse(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Add."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Adding."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        tools=[TOOL],
    )
    assert found.messages == [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Adding."}],
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
    ]


BAD = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "quotes"),
    ({"model": None}, "model is missing"),
    ({"messages": None}, "messages must be an array"),
    ({"messages": []}, "at least one"),
    ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, '"user" or "assistant"'),
    ({"messages": [{"role": "user", "content": None}]}, "array of content blocks, not null"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, '"image"'),
    ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "a number"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a string"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}]}]}, "input must be"),
    ({"system": 5}, "system must be"),
    ({"system": [{"type": "image"}]}, r"system\[0\]"),
    ({"temperature": "0.5"}, "quotes"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": [""]}, "empty string"),
    ({"stop_sequences": ["x"] * 1000}, "at most"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run on the server"),
    ({"tools": [{**TOOL, "name": "no spaces"}]}, "name"),
    ({"tools": [TOOL] * 1000}, "at most"),
    ({"tool_choice": "auto"}, "object"),
    ({"tool_choice": {"type": "some"}}, '"any"'),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"thinking": {"type": "hard"}}, "thinking"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_input_is_told(change, words):
    with pytest.raises(InvalidInput, match=words):
        anthropic.parse_messages_request({"model": MODEL, "max_tokens": 9, "messages": ASK, **change})


@pytest.mark.parametrize("first", [{}, {"content": None}, {"contents": "Hi"}])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_turns_of_one_role_are_not_joined_with_one_that_says_nothing(first, role):
    messages = [{"role": role, **first}, {"role": role, "content": "Hi"}]
    with pytest.raises(InvalidInput, match=r"messages\[0\]\.content"):
        anthropic.parse_messages_request({"model": MODEL, "max_tokens": 9, "messages": messages})


def test_counting_needs_no_limit_of_tokens():
    request = anthropic.parse_count({"model": MODEL, "messages": ASK})
    assert request.messages == ASK
    with pytest.raises(InvalidInput, match="max_tokens"):
        anthropic.parse_count({"model": MODEL, "messages": ASK, "max_tokens": -1})
    assert anthropic_answers.render_count(7) == {"input_tokens": 7}


def test_the_whole_message():
    request = parse()
    found = Message.model_validate(anthropic_answers.render_message(request, EVENTS), strict=True)
    assert [block.type for block in found.content] == ["text", "tool_use", "tool_use"]
    assert found.content[0].text == "Lima." and found.content[1].input == {"a": 1}  # type: ignore[union-attr]
    assert found.stop_reason == "tool_use" and found.stop_sequence is None
    usage = found.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 16, 3)


@pytest.mark.parametrize(
    ("done", "reason", "sequence"),
    [
        (ChoiceDone(0, "stop"), "end_turn", None),
        (ChoiceDone(0, "stop", "END"), "stop_sequence", "END"),
        (ChoiceDone(0, "length"), "max_tokens", None),
        (ChoiceDone(0, "tool_calls", "END"), "tool_use", None),
    ],
)
def test_why_it_ended(done, reason, sequence):
    found = anthropic_answers.render_message(parse(), [TextDelta(0, "x"), done, USAGE])
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def events_of(data: bytes) -> httpx2.Response:
    return httpx2.Response(200, content=data, headers={"content-type": "text/event-stream"})


async def _served(events: list[Event], fail: Exception | None = None) -> list[bytes]:
    request = parse()
    return [f async for f in anthropic_answers.stream_message(request, stream(events, fail), 21)]


async def test_the_client_puts_a_stream_together_as_the_whole_message():
    data = b"".join(await _served(EVENTS))
    with client(events_of(data)).messages.stream(model=MODEL, max_tokens=9, messages=ASK) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    whole = anthropic_answers.render_message(parse(), EVENTS)
    assert [block.model_dump(exclude_none=True) for block in final.content] == whole["content"]
    assert final.stop_reason == "tool_use"
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.output_tokens) == (5, 16, 3)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert b"event: ping" in data


async def test_a_failing_stream_raises_in_the_client():
    data = b"".join(await _served([TextDelta(0, "x")], OutOfCapacity()))
    with pytest.raises(sdk.APIStatusError, match="Capacity"):
        list(client(events_of(data)).messages.create(model=MODEL, max_tokens=9, messages=ASK, stream=True))


def test_the_list_of_models_reads_as_anthropics_too():
    record = {"name": "@cf/a/m", "created_at": "2026-01-02 00:00:00.000", "properties": [], "description": ""}
    record["task"] = {"name": "Text Generation"}
    answer = httpx2.Response(200, json=models.openai_models([record]))
    [found] = list(client(answer).models.list())
    assert (found.id, found.type, found.display_name, found.created_at.year) == ("@cf/a/m", "model", "m", 2026)
    assert list(client(httpx2.Response(200, json=models.openai_models([]))).models.list()) == []


@pytest.mark.parametrize(
    ("error", "raised", "kind"),
    [
        (InvalidInput("x"), sdk.BadRequestError, "invalid_request_error"),
        (AuthError(), sdk.AuthenticationError, "authentication_error"),
        (AccountForbidden("a"), sdk.PermissionDeniedError, "permission_error"),
        (NotFound("x"), sdk.NotFoundError, "not_found_error"),
        (BodyTooLarge(1), sdk.APIStatusError, "request_too_large"),
        (OutOfCapacity(), sdk.RateLimitError, "rate_limit_error"),
        (ModelLoading("m"), sdk.APIStatusError, "overloaded_error"),
    ],
)
def test_errors_in_the_clients_words(error: ApiError, raised, kind):
    answer = httpx2.Response(error.status, json=anthropic_answers.error_body(error), headers=error.headers)
    with pytest.raises(raised) as caught:
        client(answer).messages.create(model=MODEL, max_tokens=9, messages=ASK)
    assert caught.value.body["error"]["type"] == kind and caught.value.body["errors"][0]["code"] == error.code
