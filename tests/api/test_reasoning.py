"""Reasoning and tool calls that come in parts: every dialect, streamed and whole, read by its own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import pytest
from anthropic import Anthropic
from cloudflare import Cloudflare

from serve_app.api.anthropic import read as anthropic
from serve_app.api.anthropic import write as anthropic_answers
from serve_app.api.errors import InvalidInput
from serve_app.api.fields import messages
from serve_app.api.openai import read as openai
from serve_app.api.openai import write as openai_answers
from serve_app.api.responses import read as responses
from serve_app.api.responses import write as responses_answers
from serve_app.api.types import ChoiceDone, Event, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from serve_app.tasks.text_generation.read import parse_generate
from serve_app.tasks.text_generation.write import render_generate, stream_generate
from tests.api.clients import MODEL, client

EVENTS: list[Event] = [
    ReasoningDelta(0, "Two and "),
    ReasoningDelta(0, "two."),
    TextDelta(0, "Let me add."),
    ToolCallDelta(0, 0, "call_1", "add", "", False),
    ToolCallDelta(0, 0, "call_1", "", '{"a"', False),
    ToolCallDelta(0, 0, "call_1", "", ": 2}", False),
    ToolCallDelta(0, 0, "call_1", "", "", True),
    ToolCallDelta(0, 1, "call_2", "now", "{}", True),
    ChoiceDone(0, "tool_calls"),
    Usage(prompt_tokens=21, completion_tokens=9, reasoning_tokens=4),
]
BROKEN: list[Event] = [
    ToolCallDelta(0, 0, "call_1", "add", '{"a": oops', True),
    ChoiceDone(0, "tool_calls"),
    Usage(),
]
ASK = [{"role": "user", "content": "2+2?"}]
CHAT = openai.parse_chat({"model": MODEL, "messages": ASK, "stream": True, "stream_options": {"include_usage": True}})
NATIVE = parse_generate({"messages": ASK}, MODEL)
TURN = responses.parse_responses({"model": MODEL, "input": "2+2?"})
THINKING = anthropic.parse_messages_request(
    {"model": MODEL, "messages": ASK, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}}
)
NO_THINKING = anthropic.parse_messages_request({"model": MODEL, "messages": ASK, "max_tokens": 9})


async def stream(events: list[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


def joined(frames: AsyncIterator[bytes]) -> bytes:
    async def read() -> bytes:
        return b"".join([frame async for frame in frames])

    return asyncio.run(read())


def sse(data: bytes) -> httpx.Client:
    answer = httpx.Response(200, content=data, headers={"content-type": "text/event-stream"})
    return httpx.Client(transport=httpx.MockTransport(lambda _: answer))


def test_openai_whole_and_streamed():
    message = openai_answers.render_chat(CHAT, EVENTS)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Let me add.")
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 2}'},
        {"name": "now", "arguments": "{}"},
    ]
    data = joined(openai_answers.stream_chat(CHAT, stream(EVENTS)))
    with client(sse(data)).chat.completions.stream(model=MODEL, messages=ASK) as events:
        seen = list(events)
        final = events.get_final_completion()
    told = final.choices[0].message
    assert told.content == "Let me add." and final.choices[0].finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in told.tool_calls or ()] == [
        ("add", '{"a": 2}'),
        ("now", "{}"),
    ]
    deltas = [e.arguments_delta for e in seen if e.type == "tool_calls.function.arguments.delta"]
    assert [d for d in deltas if d] == ['{"a"', ": 2}", "{}"]
    chunks = [e.chunk for e in seen if e.type == "chunk"]
    thought = [getattr(c.choices[0].delta, "reasoning_content", None) for c in chunks if c.choices]
    assert "".join(t for t in thought if t) == "Two and two."
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens_details.reasoning_tokens == 4


def test_native_whole_and_streamed():
    result = render_generate(NATIVE, EVENTS)["result"]
    assert result["response"] == "Let me add." and result["tool_calls"][0]["arguments"] == {"a": 2}
    assert result["choices"][0]["message"]["reasoning_content"] == "Two and two."
    data = joined(stream_generate(NATIVE, stream(EVENTS)))
    assert data.endswith(b"data: [DONE]\n\n")
    frames = [json.loads(line[6:]) for line in data.decode().split("\n\n")[:-2]]
    # A text that a frame carried in both forms would be shown twice.
    assert not [f for f in frames if f["response"] and f.get("choices")]
    assert "".join(f["response"] for f in frames) == "Let me add."
    calls = [call for f in frames for call in f.get("tool_calls", ())]
    assert [(c["index"], c["name"], c["arguments"]) for c in calls] == [(0, "add", {"a": 2}), (1, "now", {})]
    thought = [f["choices"][0]["delta"]["reasoning_content"] for f in frames if "choices" in f]
    assert "".join(thought) == "Two and two."
    assert frames[-1]["finish_reason"] == "tool_calls"


def anthropic_client(answer: httpx2.Response) -> Anthropic:
    http = httpx2.Client(transport=httpx2.MockTransport(lambda _: answer))
    return Anthropic(api_key="t", base_url="http://localhost", http_client=http, max_retries=0)


@pytest.mark.parametrize(("request_", "kinds"), [(THINKING, ["thinking"]), (NO_THINKING, [])])
def test_anthropic_whole_and_streamed(request_, kinds):
    whole = anthropic_answers.render_message(request_, EVENTS)
    assert [block["type"] for block in whole["content"]] == [*kinds, "text", "tool_use", "tool_use"]
    data = joined(anthropic_answers.stream_message(request_, stream(EVENTS), 21))
    answer = httpx2.Response(200, content=data, headers={"content-type": "text/event-stream"})
    with anthropic_client(answer).messages.stream(model=MODEL, max_tokens=9, messages=ASK) as events:
        seen = [event.type for event in events]
        final = events.get_final_message()
    assert [block.model_dump(exclude_none=True) for block in final.content] == whole["content"]
    assert final.stop_reason == "tool_use" and seen.count("input_json") == 3


def test_responses_whole_and_streamed():
    whole = responses_answers.render_response(TURN, EVENTS)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    [message] = responses_answers.as_messages(whole)
    assert message["reasoning_content"] == "Two and two." and len(message["tool_calls"]) == 2

    async def keep(_: dict[str, Any]) -> None:
        pass

    data = joined(responses_answers.stream_response(TURN, stream(EVENTS), keep))
    with client(sse(data)).responses.stream(model=MODEL, input="hi") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output[0].content[0].text == "Two and two." and final.output_text == "Let me add."
    assert final.output[2].arguments == '{"a": 2}'
    assert kinds.count("response.reasoning_text.delta") == 2 and kinds.count("response.reasoning_text.done") == 1
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4


def test_reasoning_alone_still_answers():
    cut: list[Event] = [ReasoningDelta(0, "Two"), ChoiceDone(0, "length"), Usage()]
    whole = responses_answers.render_response(TURN, cut)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["status"] == "incomplete" and len(responses_answers.as_messages(whole)) == 1
    message = openai_answers.render_chat(CHAT, cut)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "Two")


def test_broken_arguments_reach_every_reader():
    assert render_generate(NATIVE, BROKEN)["result"]["tool_calls"][0]["arguments"] == '{"a": oops'
    [call] = openai_answers.render_chat(CHAT, BROKEN)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": oops'
    [block] = anthropic_answers.render_message(THINKING, BROKEN)["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": oops'}


def test_reasoning_goes_back_with_the_history():
    whole = responses_answers.render_response(TURN, EVENTS)
    back = responses.parse_input(whole["output"])
    assert back[0]["reasoning_content"] == "Two and two." and len(back[0]["tool_calls"]) == 2
    openai_minded = messages.parse_messages([*ASK, {"role": "assistant", "content": "4", "reasoning": "hm"}])
    assert openai_minded[1]["reasoning_content"] == "hm"
    content = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "4"}]
    body = {"model": MODEL, "max_tokens": 9, "messages": [*ASK, {"role": "assistant", "content": content}, *ASK]}
    assert anthropic.parse_messages_request(body).messages[1]["reasoning_content"] == "hm"


def test_how_much_to_think():
    def asked(**fields: Any) -> dict[str, Any]:
        return openai.parse_chat({"model": MODEL, "messages": ASK, **fields}).template_kwargs

    assert asked() == {} and asked(reasoning_effort=None) == {}
    off = {"enable_thinking": False, "thinking": False}
    assert asked(reasoning_effort="none") == off
    assert asked(reasoning_effort="high") == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    kwargs = {"enable_thinking": False}
    assert asked(reasoning_effort="low", chat_template_kwargs=kwargs)["enable_thinking"] is False
    told = responses.parse_responses({"model": MODEL, "input": "x", "reasoning": {"effort": "none"}})
    assert told.generate.template_kwargs == off
    assert parse_generate({"prompt": "x", "reasoning_effort": "none"}, MODEL).template_kwargs == off
    for wrong in ("hard", 5, ["low"]):
        with pytest.raises(InvalidInput, match="reasoning_effort"):
            asked(reasoning_effort=wrong)


def test_tool_results_may_be_empty():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = messages.parse_messages([*history, {"role": "tool", "tool_call_id": "c", "content": None}])
    assert found[2]["content"] == ""


def test_cloudflare_reads_the_superset():
    body = render_generate(NATIVE, EVENTS)
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=body))) as http:
        sdk = Cloudflare(api_token="t", base_url="http://localhost/client/v4", http_client=http)
        assert sdk.ai.run(MODEL, account_id="a", prompt="x")["tool_calls"][0]["name"] == "add"
