"""The grammar of a request: what its format, its tools and its tool choice let the model write."""

from __future__ import annotations

import json

import pytest

from serve_app.api.errors import InvalidInput
from serve_app.api.openai.read import parse_chat
from serve_app.grammar.answer import answer_grammar, needs_grammar, token_rule
from serve_app.text.reasoning import MARKS, Marks
from serve_app.text.tool_calls import PARSERS
from serve_app.text.tool_calls.grammars import FAMILIES

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMA = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}},
                                                 "required": ["a"], "additionalProperties": False}}  # fmt: skip
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "pico": '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "deepseek": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "harmony": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}',
}


@pytest.fixture
def fits(grammars, tokenizer):
    """Whether a text is a whole answer to a request."""

    def check(text: str, family="pico", marks=None, inside=False, **body) -> bool:
        request = parse_chat({"model": "@cf/a/b", "messages": [{"role": "user", "content": "x"}], **body})
        built = answer_grammar(request, token=token_rule(tokenizer), family=family, marks=marks, inside=inside)
        assert built is not None and needs_grammar(request)
        matcher = grammars.matcher(built)
        ids = tokenizer.encode_prompt(text).tolist()
        whole = matcher.advance(ids) == len(ids)
        return whole and (matcher.ended or matcher.allowed([tokenizer._id_of("eos_token")]) == 1)

    return check


@pytest.mark.parametrize("family", list(FAMILIES))
def test_forced_calls_are_what_the_parser_reads(fits, family):
    text = CALLS[family]
    assert fits(text, family, tools=TOOLS, tool_choice="required")
    assert not fits("I would rather not.", family, tools=TOOLS, tool_choice="required")
    assert not fits(text.replace("Rome", "Bonn"), family, tools=TOOLS, tool_choice="required")
    assert not fits(text.replace("get_weather", "get_whether"), family, tools=TOOLS, tool_choice="required")
    assert fits(text, family, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert not fits(text, family, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    parser = PARSERS[family](TOOLS)
    pieces = [*parser.feed(text), *parser.finish()]
    assert "".join(piece.name for piece in pieces if not isinstance(piece, str)) == "get_weather"
    assert json.loads("".join(p.arguments for p in pieces if not isinstance(p, str))) == {"city": "Rome"}


def test_every_family_of_parsers_has_a_grammar():
    assert set(FAMILIES) == set(PARSERS)


def test_parallel_calls(fits):
    both = CALLS["pico"] + '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert fits(both, tools=TOOLS, tool_choice="required")
    assert not fits(both, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert fits(CALLS["pico"], tools=TOOLS, tool_choice="required", parallel_tool_calls=False)


def test_allowed_tools(fits):
    only_now = {"type": "allowed_tools", "tools": [{"type": "function", "name": "now"}]}
    now = CALLS["pico"].replace("get_weather", "now").replace('{"city": "Rome"}', "{}")
    for mode, silent in (("required", False), ("auto", True)):
        choice = {**only_now, "mode": mode}
        assert fits(now, tools=TOOLS, tool_choice=choice)
        assert not fits(CALLS["pico"], tools=TOOLS, tool_choice=choice)
        assert fits("Hello!", tools=TOOLS, tool_choice=choice) is silent


@pytest.mark.parametrize("family", list(FAMILIES))
def test_strict_tools_may_be_called_but_only_right(fits, family):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert fits("No calls needed.", family, tools=strict)
    assert fits(CALLS[family], family, tools=strict)
    assert not fits(CALLS[family].replace("Rome", "Bonn"), family, tools=strict)
    if family not in ("llama3", "harmony"):
        assert fits(f"Let me see. {CALLS[family]}", family, tools=strict)


def test_a_format_and_tools(fits):
    for text in ('{"a": 3}', CALLS["pico"]):
        assert fits(text, tools=TOOLS, response_format=SCHEMA)
    for text in ('{"a": "3"}', "text", CALLS["pico"] + '{"a": 3}'):
        assert not fits(text, tools=TOOLS, response_format=SCHEMA)
    assert not fits(CALLS["pico"], tools=TOOLS, response_format=SCHEMA, tool_choice="none")


def test_reasoning_comes_before_the_answer(fits):
    marks = Marks("<think>", "</think>")
    for inside, thought in ((True, "Hm, {3}?\n</think>\n\n"), (False, "<think>Hm\n</think>\n"), (False, "")):
        assert fits(thought + '{"a": 3}', marks=marks, inside=inside, response_format=SCHEMA)
        assert not fits(thought + "3", marks=marks, inside=inside, response_format=SCHEMA)
        assert fits(thought + CALLS["pico"], marks=marks, inside=inside, tools=TOOLS, tool_choice="required")
    assert not fits('{"a": 3}', marks=marks, inside=True, response_format=SCHEMA)


def test_marks_of_several_control_tokens(fits):
    harmony = MARKS["harmony"]
    for thought in (f"{harmony.start}Hm.{harmony.end}", harmony.direct):
        assert fits(thought + '{"a": 3}', marks=harmony, response_format=SCHEMA)
        assert not fits(thought + "3", marks=harmony, response_format=SCHEMA)
    assert not fits('{"a": 3}', marks=harmony, response_format=SCHEMA)
    # With a tokenizer that has them.
    ids = {"<|channel|>": 200005, "<|message|>": 200008, "<|end|>": 200007, "<|start|>": 200006}
    request = parse_chat(
        {"model": "@cf/a/b", "messages": [{"role": "user", "content": "x"}], "response_format": SCHEMA}
    )
    built = answer_grammar(request, token=lambda name: f"<[{ids[name]}]>" if name in ids else None, marks=harmony)
    assert 'start: <[200005]> "analysis" <[200008]> thought final | <[200005]> "final" <[200008]> final' in built
    closing = '<[200007]> <[200006]> "assistant" <[200005]> "final" <[200008]>'
    assert f"thought: /(?s:.*)/ {closing}" in built


def test_arguments_have_no_properties_that_the_tool_does_not_name(fits):
    extra = CALLS["pico"].replace('"Rome"', '"Rome", "x": 1')
    assert not fits(extra, tools=TOOLS, tool_choice="required")
    free = [{"name": "get_weather", "parameters": {"type": "object"}}]
    assert fits(extra, tools=free, tool_choice="required")


def test_whom_to_blame():
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "x", "parameters": bad}}]

    def build(family="pico", **body):
        request = parse_chat({"model": "@cf/a/b", "messages": [{"role": "user", "content": "x"}], **body})
        return answer_grammar(request, token=lambda name: None, family=family)

    with pytest.raises(InvalidInput, match=r"tools\[1\].function.parameters: .*uniqueItems") as refused:
        build(tools=tools, tool_choice="required")
    assert refused.value.param == "tools[1].function.parameters"
    # Nothing was promised about the arguments of a call that the model may make or not.
    assert build(tools=tools, response_format=SCHEMA)
    assert build(tools=tools) is None
    with pytest.raises(InvalidInput, match="no format for tool calls"):
        build("none", tools=tools, tool_choice="required")
    with pytest.raises(InvalidInput, match="guided_grammar can't be combined"):
        build(tools=TOOLS, guided_grammar='start: "a"', tool_choice="required")


def test_calls_that_are_messages_come_in_the_place_of_the_last_one(fits):
    marks, call = MARKS["harmony"], CALLS["harmony"]
    thought = f"{marks.start}Hm.<|end|><|start|>assistant"
    forced = {"marks": marks, "tools": TOOLS, "tool_choice": "required"}
    free = {"marks": marks, "tools": TOOLS, "response_format": SCHEMA}
    for before in ("", thought):
        assert fits(before + call, "harmony", **forced)
        for said in ("Hi", '{"a": 3}', call):
            assert not fits(f"{before}{marks.direct}{said}", "harmony", **forced)
        assert fits(before + call, "harmony", **free)
        assert fits(f'{before}{marks.direct}{{"a": 3}}', "harmony", **free)
        assert not fits(f"{before}{marks.direct}3", "harmony", **free)
    assert not fits(thought.replace("<|end|>", "") + call, "harmony", **forced)
