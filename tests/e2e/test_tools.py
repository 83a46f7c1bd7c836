"""Tool calls of the chat model, by the template it was trained with, in both dialects."""

from __future__ import annotations

import json

from openai import OpenAI

from tests.e2e.conftest import CHAT
from tests.weather import WEATHER

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_native_tool_call(run):
    result = run(CHAT, {"messages": QUESTION, "tools": [WEATHER["function"]], "temperature": 0})
    [call] = result["tool_calls"]
    assert call["name"] == "get_weather" and call["arguments"] == {"city": "Paris"}
    assert result["finish_reason"] == "tool_calls" and "<tool_call>" not in result["response"]


def test_openai_tool_call_plain_streamed_and_answered(stack):
    client = OpenAI(api_key=stack.key, base_url=f"{stack.url}/v1", max_retries=0)
    plain = client.chat.completions.create(model=CHAT, messages=QUESTION, tools=[WEATHER], temperature=0)
    [call] = plain.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    assert plain.choices[0].finish_reason == "tool_calls"

    name, arguments, finish = "", "", None
    for chunk in client.chat.completions.create(
        model=CHAT, messages=QUESTION, tools=[WEATHER], temperature=0, stream=True
    ):
        finish = chunk.choices[0].finish_reason or finish
        for piece in chunk.choices[0].delta.tool_calls or []:
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, json.loads(arguments), finish) == ("get_weather", {"city": "Paris"}, "tool_calls")

    history = [*QUESTION, plain.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 C"}]
    answer = client.chat.completions.create(model=CHAT, messages=history, tools=[WEATHER], temperature=0)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content
