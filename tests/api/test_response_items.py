"""References to items of stored responses."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.errors import InvalidInput, NotFound
from serve_app.api.fields.content import content_text
from serve_app.api.responses import read as responses
from serve_app.api.responses import write as responses_answers
from serve_app.api.responses.items import MAX_REFERRED, resolve_references
from serve_app.api.types import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta, Usage

MODEL = "@cf/pico/pico-instruct"
REQUEST = responses.parse_responses({"model": MODEL, "input": "hi"})
STORED = responses_answers.render_response(
    REQUEST,
    [
        ReasoningDelta(0, "hm"),
        TextDelta(0, "Let me look."),
        ToolCallDelta(0, 0, "call_1", "get_weather", '{"city": "Paris"}'),
        ChoiceDone(0, "tool_calls"),
        Usage(),
    ],
)


async def fetch(named: str) -> dict[str, Any]:
    if named != STORED["id"]:
        raise NotFound("no")
    return STORED


async def resolve(*items: Any) -> list[Any]:
    return (await resolve_references({"model": MODEL, "input": list(items)}, fetch))["input"]


def reference(named: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": named}


async def test_references_become_the_items():
    answer = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    found = await resolve(*(reference(item["id"]) for item in STORED["output"]), answer)
    assert found == [*STORED["output"], answer]
    messages = responses.parse_input(found)
    assert [m["role"] for m in messages] == ["assistant", "tool"]
    assert content_text(messages[0]["content"]) == "Let me look." and messages[0]["tool_calls"][0]["id"] == "call_1"
    assert messages[0]["reasoning_content"] == "hm"


async def test_an_id_alone_is_a_reference():
    assert await resolve({"id": STORED["output"][1]["id"]}) == [STORED["output"][1]]


async def test_other_inputs_stay_as_they_are():
    for body in ({"input": "hi"}, {"input": [{"role": "user", "content": "x"}]}, {"input": 5}, {}):
        assert await resolve_references(body, fetch) is body


GONE = "msg_" + "0" * 32 + "0000"


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([reference(GONE)], "is not here"),
        ([reference(STORED["output"][0]["id"][:-1] + "9")], "is not here"),
        ([reference(STORED["output"][0]["id"].replace("rs_", "fc_"))], "is not here"),
        ([reference("../../x")], "id of an item"),
        ([reference(5)], "id of an item"),
        ([{"type": "item_reference"}], "id of an item"),
    ],
)
async def test_what_is_not_stored_is_told(items, words):
    with pytest.raises(InvalidInput, match=words):
        await resolve(*items)


async def test_the_number_of_responses_is_bounded():
    async def any_response(named: str) -> dict[str, Any]:
        return {"output": [{"id": f"msg_{named.removeprefix('resp_')}0000"}]}

    items = [reference(f"msg_{i:032x}0000") for i in range(MAX_REFERRED + 1)]
    assert await resolve_references({"input": items[:-1]}, any_response)
    with pytest.raises(InvalidInput, match="more than"):
        await resolve_references({"input": items}, any_response)
