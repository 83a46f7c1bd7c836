"""Structured output and forced tool calls against the live server, with unmodified clients, in every dialect."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import anthropic
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.e2e.conftest import CHAT
from tests.weather import WEATHER

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Tell me about Anna, who is 31."}]
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}, "unix": {"type": "boolean"}},
            "required": ["zone", "unix"],
        },
    },
}


# Bounds, because the shipped model is small and would go on and on.
Name = Annotated[str, Field(max_length=12)]


class Event(BaseModel):
    title: Name
    kind: Literal["talk", "walk"]
    people: Annotated[list[Name], Field(max_length=3)]
    minutes: Annotated[int, Field(ge=0, le=600)] | None


@pytest.fixture(scope="module")
def client(stack):
    return OpenAI(api_key=stack.key, base_url=f"{stack.url}/v1", max_retries=0)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": PERSON}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
        {"guided_json": PERSON},
        {"structured_outputs": {"json": PERSON}},
    ],
)
def test_native_answers_are_objects(run, form):
    result = run(CHAT, {"messages": ASK, **form})
    jsonschema.validate(result["response"], PERSON)
    assert result["finish_reason"] == "stop"
    assert json.loads(result["choices"][0]["message"]["content"]) == result["response"]


def test_native_streams_say_it_as_text(http):
    body = {"messages": ASK, "stream": True, "response_format": {"type": "json_schema", "json_schema": PERSON}}
    said = ""
    with http.stream("POST", f"/run/{CHAT}", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["response"]
    jsonschema.validate(json.loads(said), PERSON)


def test_what_is_cut_off_stays_text(run):
    result = run(CHAT, {"messages": ASK, "max_tokens": 4, "guided_json": PERSON})
    assert isinstance(result["response"], str) and result["finish_reason"] == "length"


def test_choices_regexes_and_grammars(run):
    assert run(CHAT, {"prompt": "Yes or no?", "guided_choice": ["yes", "no"]})["response"] in ("yes", "no")
    date = run(CHAT, {"prompt": "When?", "guided_regex": r"\d{4}-\d{2}-\d{2}"})["response"]
    assert len(date) == 10 and date[4] == date[7] == "-"
    sum_ = run(CHAT, {"prompt": "Add!", "guided_grammar": 'root ::= num "+" num\nnum ::= [0-9]{1,3}'})["response"]
    assert all(part.isdigit() for part in sum_.split("+"))
    assert isinstance(run(CHAT, {"prompt": "JSON!", "response_format": {"type": "json_object"}, "max_tokens": 900,
                                 "seed": 3})["response"], (dict, str))  # fmt: skip


def test_openai_parse_helper(client):
    parsed = client.chat.completions.parse(model=CHAT, messages=ASK, response_format=Event, max_tokens=400)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Event)


def test_openai_parse_helper_streaming(client):
    with client.chat.completions.stream(model=CHAT, messages=ASK, response_format=Event, max_tokens=400) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Event)


def test_openai_responses_parse(client):
    parsed = client.responses.parse(model=CHAT, input="Tell me about Anna.", text_format=Event, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Event)
    shown = parsed.text.format
    assert shown.type == "json_schema" and shown.name == "Event"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            {"get_time"},
        ),
    ],
)
def test_forced_tool_calls(client, choice, names, stream):
    asked = dict(model=CHAT, messages=[{"role": "user", "content": "Hello there!"}], tools=[WEATHER, TIME],
                 tool_choice=choice, parallel_tool_calls=False, max_tokens=300)  # fmt: skip
    if stream:
        with client.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name in names and answer.choices[0].finish_reason == "tool_calls"
    tool = {"get_weather": WEATHER, "get_time": TIME}[call.function.name]
    jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])


def test_parse_helper_with_tools(client):
    tool = openai.pydantic_function_tool(Event)
    answer = client.chat.completions.parse(model=CHAT, messages=ASK, tools=[tool], tool_choice="required",
                                           parallel_tool_calls=False, max_tokens=400)  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Event)


def test_no_calls_where_they_are_not_wanted(client):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(model=CHAT, messages=question, tools=[WEATHER], tool_choice="none")
    assert not answer.choices[0].message.tool_calls


def test_strict_tools_are_called_right_or_not_at_all(client):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = client.chat.completions.create(model=CHAT, messages=question, tools=[strict], temperature=0)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_anthropic_forced_tools(stack):
    client = anthropic.Anthropic(api_key=stack.key, base_url=stack.url, max_retries=0)
    tools = [{"name": "get_time", "input_schema": TIME["function"]["parameters"]},
             {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]  # fmt: skip
    for choice in ({"type": "tool", "name": "get_time"}, {"type": "any", "disable_parallel_tool_use": True}):
        message = client.messages.create(model=CHAT, max_tokens=300, tools=tools, tool_choice=choice,
                                         messages=[{"role": "user", "content": "Hello!"}])  # fmt: skip
        [used] = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        schema = next(tool["input_schema"] for tool in tools if tool["name"] == used.name)
        jsonschema.validate(used.input, schema)


def test_anthropic_output_format(http):
    body = {
        "model": CHAT,
        "max_tokens": 300,
        "messages": ASK,
        "output_format": {"type": "json_schema", "schema": PERSON},
    }
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(json.loads(answer.json()["content"][0]["text"]), PERSON)


BAD = [
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "look-around"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"$ref": "https://example.com/x"}}},
        "copy what it names",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}},
        "uniqueItems",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}, "no finite value"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_ones_are_told_before_anything_is_generated(client, change, words):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        client.chat.completions.create(model=CHAT, messages=ASK, stream=True, extra_body=change)
    assert refused.value.code == "5006"
