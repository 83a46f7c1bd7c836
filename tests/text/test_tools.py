"""Tool call formats, plain and cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.tools import PARSERS, ToolCall

ADD = '{"name": "add", "arguments": {"a": 1, "s": "} </tool_call> ] \\" é"}}'
ARGS = {"a": 1, "s": '} </tool_call> ] " é'}
NO_CALL = '<tool_call>{"name": 3, "arguments": {}}</tool_call>'
BAD = "<tool_call>{bad}</tool_call>"
TWO = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
CASES = [
    ("hermes", f"<tool_call>{ADD}</tool_call>", "", [("add", ARGS)]),
    ("hermes", f"Let me.\n<tool_call>\n{ADD}\n</tool_call>\n", "Let me.", [("add", ARGS)]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call> ok", "ok", [("add", ARGS)] * 2),
    ("hermes", f"<tool_call>{ADD}", "", [("add", ARGS)]),
    ("hermes", f"a <tool_call>{ADD}<|x", "a<|x", [("add", ARGS)]),
    ("hermes", "<tool_call>{bad}</tool_call> after", "<tool_call>{bad}</tool_call> after", []),
    ("hermes", f"{BAD}<tool_call>{ADD}</tool_call>", BAD, [("add", ARGS)]),
    ("hermes", '<tool_call>{"name": "x", "argu', '<tool_call>{"name": "x", "argu', []),
    ("hermes", NO_CALL, NO_CALL, []),
    ("hermes", "a < b <tool <tool_cal \n end ", "a < b <tool <tool_cal \n end ", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", {"a": 2})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\\\"}}</tool_call>', "", [("f", {"s": "\\"})]),
    ("hermes", '<tool_call>{"a": "\\"</tool_call>', '<tool_call>{"a": "\\"</tool_call>', []),
    ("hermes", "plain", "plain", []),
    ("llama3", '{"name": "f", "parameters": {"x": [1, 2]}}', "", [("f", {"x": [1, 2]})]),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3", TWO, "", [("f", {}), ("g", {})]),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", '{"name": "f", "parameters": {"x"', '{"name": "f", "parameters": {"x"', []),
    ("llama3", "Hello {", "Hello {", []),
    ("llama3", "<|pyt", "<|pyt", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", {"x": 1}), ("g", {})]),
    ("mistral", 'Ok. [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "Ok.", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"x": 1}), ("g", {})]),
    ("mistral", "[TOOL_CALLS][oops", "[TOOL_CALLS][oops", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "a [TOOL] list [1]", "a [TOOL] list [1]", []),
]  # fmt: skip


def parse(name: str, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = PARSERS[name]()
    items = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    text = "".join(item for item in items if isinstance(item, str))
    return text, [item for item in items if isinstance(item, ToolCall)]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
def test_formats_whole_and_character_by_character(name, text, said, calls):
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        found_text, found = parse(name, pieces)
        assert found_text == said
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
        assert len({call.id for call in found}) == len(found)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(PARSERS)))
def test_any_text_gives_the_same_whatever_way_it_is_cut(data, name):
    bits = st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            '{"name": "f", "arguments": {"a": 1}}',
            "{",
            "[",
            " ",
            "x",
            "\n",
            ";",
        ]
    )
    text = "".join(data.draw(st.lists(bits, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole_text, whole_calls = parse(name, [text])
    cut_text, cut_calls = parse(name, pieces)
    assert cut_text == whole_text
    assert [(c.name, c.arguments) for c in cut_calls] == [(c.name, c.arguments) for c in whole_calls]


def test_text_before_a_call_streams_on():
    parser = PARSERS["hermes"]()
    assert parser.feed("Hello ") == ["Hello"]
    assert parser.feed("world <tool") == [" world"]
    assert parser.feed("bar") == [" <toolbar"]
