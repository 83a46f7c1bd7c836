"""The OpenAI Responses dialect, read and written by its unmodified client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from serve_app.api.errors import ApiError, OutOfCapacity, current_request
from serve_app.api.responses import read as responses
from serve_app.api.responses import write as responses_answers
from serve_app.api.responses.conversation import page_of
from serve_app.api.types import ChoiceDone, Event, ModelLimits, TextDelta, TokenLogprob, ToolCallDelta, Usage
from tests.api.clients import MODEL, client, sent_by
from tests.api.test_answers import stream

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": True,
}
USAGE = Usage(prompt_tokens=21, completion_tokens=3, cached_tokens=16, micro_neurons=250_000)
EVENTS: list[Event] = [
    TextDelta(0, "Li"),
    TextDelta(0, "ma."),
    ToolCallDelta(0, 0, "call_1", "add", '{"a": 1}'),
    ToolCallDelta(0, 1, "call_2", "add", "{}"),
    ChoiceDone(0, "tool_calls"),
    USAGE,
]
PREVIOUS = "resp_" + "0" * 32


def parse(**fields: Any) -> responses.ResponsesRequest:
    """What the SDK sends for ``responses.create(**fields)``, as our request."""
    asked = {"model": MODEL, "input": "hi", **fields}
    return responses.parse_responses(
        sent_by(lambda http: client(http).responses.create(**asked)).content, ModelLimits()
    )


def test_what_the_client_sends():
    found = parse(
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.2,
        top_p=0.9,
        tools=[TOOL],
        tool_choice="auto",
        previous_response_id=PREVIOUS,
        store=False,
        metadata={"k": "v"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        truncation="auto",
        user="u",
        parallel_tool_calls=False,
    )
    assert found.generate.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    sampling = found.generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.logprobs) == (9, 0.2, 0.9, 2)
    assert (found.previous, found.store, found.generate.tool_choice) == (PREVIOUS, False, "auto")
    assert found.generate.tools and found.generate.tools[0]["function"]["name"] == "add"
    assert found.shown["metadata"] == {"k": "v"} and found.shown["parallel_tool_calls"] is False
    assert parse().store and parse().previous is None


def test_items_become_a_conversation():
    found = parse(
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Adding."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
        ]
    )
    assert found.turn == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Adding."}],
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "id": "c1"},
                {"type": "function", "function": {"name": "add", "arguments": "{}"}, "id": "c2"},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": [{"type": "text", "text": "0"}], "tool_call_id": "c2"},
    ]


def test_what_went_before_comes_between_the_instructions_and_the_turn():
    found = parse(instructions="New rules.")
    before = [{"role": "user", "content": "earlier"}, {"role": "assistant", "content": "yes"}]
    assert [m["content"] for m in found.messages(before)] == ["New rules.", "earlier", "yes", "hi"]


BAD = [
    ({"model": None}, "model is missing"),
    ({"input": None}, "input is missing"),
    ({"input": []}, "at least one"),
    ({"input": 5}, "input must be an array"),
    ({"input": ["hi"]}, r"input\[0\] must be an object"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "role"),
    ({"input": [{"role": "user", "content": None}]}, "content is missing"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, '"input_image"'),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "output is missing"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, '"item_reference"'),
    ({"input": [{"type": 5}]}, "not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": "1"}, "quotes"),
    ({"stream": 1}, "stream"),
    ({"store": "no"}, "store"),
    ({"instructions": 5}, "instructions"),
    ({"previous_response_id": "../../etc"}, "resp_"),
    ({"previous_response_id": 7}, "previous_response_id"),
    ({"metadata": {"k": [5]}}, "metadata.k"),
    ({"metadata": {str(i): "x" for i in range(99)}}, "at most"),
    ({"include": "all"}, "include"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "function"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"reasoning": "high"}, "reasoning"),
    ({"text": "plain"}, "text must be"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type must be"),
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": "conv_" + "0" * 32, "previous_response_id": PREVIOUS}, "exclude each other"),
    ({"prompt": "pmpt_1"}, "prompt must be"),
    ({"prompt": {"id": "../x"}}, "prompt.id must be"),
    ({"truncation": "middle"}, "truncation must be"),
    ({"lora": "mine"}, "LoRA"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_input_is_told(change, words):
    with pytest.raises(ApiError, match=words):
        responses.parse_responses({"model": MODEL, "input": "hi", **change})


def test_the_whole_response():
    body = responses_answers.render_response(parse(tools=[TOOL]), EVENTS)
    found = Response.model_validate(body, strict=True)
    assert found.output_text == "Lima." and found.status == "completed"
    assert [item.type for item in found.output] == ["message", "function_call", "function_call"]
    assert found.usage and found.usage.input_tokens_details.cached_tokens == 16
    assert responses_answers.as_messages(body) == [
        {
            "role": "assistant",
            "content": "Lima.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        }
    ]


def test_what_was_asked_reads_back_as_items():
    asked = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    listed = page_of(responses_answers.input_items(asked, PREVIOUS), None, 20, False)
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=listed))) as http:
        found = list(client(http).responses.input_items.list(PREVIOUS))
    assert [item.type for item in found] == ["message", "function_call", "function_call_output"]
    assert len({item.id for item in found}) == 3
    # What is read back can be sent again.
    assert [m["role"] for m in responses.parse_input(listed["data"])] == ["system", "assistant", "tool"]


def test_ends():
    cut = responses_answers.render_response(parse(), [TextDelta(0, "x"), ChoiceDone(0, "length"), USAGE])
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    empty = responses_answers.render_response(parse(), [ChoiceDone(0, "stop"), USAGE])
    assert Response.model_validate(empty).output_text == "" and empty["output"][0]["type"] == "message"


def test_logprobs_where_asked_for():
    logprob = TokenLogprob("Li", 1, -0.5, [("Li", 1, -0.5), ("Ro", 9, -1.5)])
    events: list[Event] = [TextDelta(0, "Li", (1,), [logprob]), ChoiceDone(0, "stop"), USAGE]
    asked = parse(include=["message.output_text.logprobs"], top_logprobs=2)
    body = responses_answers.render_response(asked, events)
    [found] = body["output"][0]["content"][0]["logprobs"]
    assert found["logprob"] == -0.5 and [top["token"] for top in found["top_logprobs"]] == ["Li", "Ro"]
    assert responses_answers.render_response(parse(), events)["output"][0]["content"][0]["logprobs"] == []


async def test_a_call_with_logprobs_is_one_item():
    """Tokens of a call have no text of their own, and none of them opens a message."""
    logprob = TokenLogprob("<tool_call>", 1, -0.5, [])
    events: list[Event] = [
        TextDelta(0, "", (1,), [logprob]),
        ToolCallDelta(0, 0, "call_1", "add", '{"a"', last=False),
        TextDelta(0, "", (2,), [logprob]),
        ToolCallDelta(0, 0, "call_1", "", ": 1}"),
        TextDelta(0, "", (3,), [logprob]),
        ChoiceDone(0, "tool_calls"),
        USAGE,
    ]
    asked = parse(tools=[TOOL], include=["message.output_text.logprobs"])
    [item] = responses_answers.render_response(asked, events)["output"]
    assert (item["type"], item["arguments"], item["status"]) == ("function_call", '{"a": 1}', "completed")
    data = await _served(events, asked=asked)
    seen, final = _streamed(data)
    assert [i.type for i in final.output] == ["function_call"] and seen[-1].type == "response.completed"
    assert not any("output_text" in event.type for event in seen)


def test_logprobs_of_tokens_without_text_go_with_the_text_they_begin():
    first, rest = TokenLogprob("\ufffd", 1, -0.5, []), TokenLogprob("\ufffd", 2, -0.25, [])
    events: list[Event] = [TextDelta(0, "", (1,), [first]), TextDelta(0, "é", (2,), [rest]), ChoiceDone(0, "stop")]
    asked = parse(include=["message.output_text.logprobs"])
    [item] = responses_answers.render_response(asked, [*events, USAGE])["output"]
    assert [token["logprob"] for token in item["content"][0]["logprobs"]] == [-0.5, -0.25]


def test_the_resource_has_every_published_field_and_says_what_was_sent():
    """Required fields: ResponseResource of the Open Responses specification."""
    required = [
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "previous_response_id",
        "instructions",
        "output",
        "error",
        "tools",
        "tool_choice",
        "truncation",
        "parallel_tool_calls",
        "text",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "max_output_tokens",
        "max_tool_calls",
        "store",
        "background",
        "service_tier",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
    ]
    plain = responses_answers.render_response(parse(tools=[TOOL]), EVENTS)
    assert [name for name in required if name not in plain] == []
    assert isinstance(plain["completed_at"], int) and plain["service_tier"] == "default"
    assert (plain["presence_penalty"], plain["top_logprobs"], plain["background"]) == (0.0, 0, False)
    assert {"type", "name", "description", "parameters", "strict"} <= plain["tools"][0].keys()
    sent = {
        "max_tool_calls": 3,
        "service_tier": "flex",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "top_logprobs": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    body = responses_answers.render_response(parse(extra_body=sent), EVENTS)
    Response.model_validate(body, strict=True)
    assert {name: body[name] for name in sent} == sent
    cut = responses_answers.render_response(parse(), [TextDelta(0, "x"), ChoiceDone(0, "length"), USAGE])
    assert cut["completed_at"] is None and cut["output"][0]["status"] == "incomplete"


def test_constraints_by_other_servers_names_hold_here_too():
    found = parse(extra_body={"guided_regex": "a+"})
    assert found.generate.answer_format is not None and found.generate.answer_format.kind == "regex"
    assert found.shown["text"] == {"format": {"type": "text"}}
    with pytest.raises(ApiError, match="exclude each other"):
        parse(text={"format": {"type": "json_object"}}, extra_body={"guided_regex": "a+"})


def test_a_format_is_shown_in_this_dialects_shape():
    schema = {"type": "object"}
    for form in (
        {"type": "json_schema", "name": "n", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ):
        body = responses_answers.render_response(parse(text={"format": form}), EVENTS)
        shown = body["text"]["format"]
        assert shown == {"type": "json_schema", "name": "n", "description": None, "schema": schema, "strict": True}
        assert Response.model_validate(body, strict=True).text


async def _served(
    events: list[Event],
    fail: Exception | None = None,
    kept: list[Any] | None = None,
    asked: responses.ResponsesRequest | None = None,
) -> bytes:
    async def keep(body: dict[str, Any]) -> None:
        (kept if kept is not None else []).append(body)

    return b"".join([f async for f in responses_answers.stream_response(asked or parse(), stream(events, fail), keep)])


def _streamed(data: bytes) -> tuple[list[Any], Any]:
    answer = httpx.Response(200, content=data, headers={"content-type": "text/event-stream"})
    http = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    with http, client(http).responses.stream(model=MODEL, input="hi") as events:
        return list(events), events.get_final_response()


async def test_the_client_puts_a_stream_together_as_the_whole_response():
    kept: list[Any] = []
    seen, final = _streamed(await _served(EVENTS, kept=kept))
    assert final.output_text == "Lima." and [item.type for item in final.output[1:]] == ["function_call"] * 2
    assert final.output[1].arguments == '{"a": 1}' and kept[0]["id"] == final.id
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    kinds = [event.type for event in seen]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3


async def test_a_cut_answer_and_a_failed_one_say_so():
    assert b"event: response.incomplete" in await _served([TextDelta(0, "x"), ChoiceDone(0, "length"), USAGE])
    kept: list[Any] = []
    data = await _served([TextDelta(0, "x")], OutOfCapacity(), kept)
    last, end = data.decode().strip().split("\n\n")[-2:]
    assert last.startswith("event: response.failed") and "rate_limit_exceeded" in last and kept == []
    assert end == "data: [DONE]" and (await _served(EVENTS)).endswith(b"\n\ndata: [DONE]\n\n")


async def test_a_failed_stream_names_the_id_of_its_request():
    current_request.set("0123abcd")
    assert b"under the id 0123abcd" in await _served([TextDelta(0, "x")], RuntimeError("secret"))
