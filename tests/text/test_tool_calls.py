"""Tool call formats, plain and cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.tool_calls import PARSERS, CallPiece
from serve_app.text.tool_calls.kimi import ARGUMENTS, CALL, END, SECTION, SECTION_END, number_calls

ADD = '{"name": "add", "arguments": {"a": 1, "s": "} </tool_call> ] \\" é"}}'
ARGS = {"a": 1, "s": '} </tool_call> ] " é'}
NO_CALL = '<tool_call>{"name": 3, "arguments": {}}</tool_call>'
BAD = "<tool_call>{bad}</tool_call>"
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>'
UNKNOWN_XML = "<tool_call><function=rm><parameter=a>1</parameter></function></tool_call>"
# Read as a whole, since its name does not come first.
SURROGATE = '{"arguments": {"s": "\\ud800"}, "name": "f"}'
TWO = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
KIMI = SECTION + CALL
TO = "<|channel|>commentary to=functions."

DSML = "｜DSML｜"
# JSON that holds the marks at its own end, and that no float can hold.
JSON_MARK = f'["a</arg_value> \\\\\\" </{DSML}parameter>", 1]'
QUOTE = '"d'
BIG = "[1e999, 123456789012345678901234567890]"


def pair(key: str, value: object, line: str = "\n") -> str:
    """An argument as GLM 4.5 writes it; 4.7 and later without line breaks."""
    return f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>"


def said(key: str, value: object, string: bool) -> str:
    """An argument as DeepSeek writes it."""
    return f'<{DSML}parameter name="{key}" string="{str(string).lower()}">{value}</{DSML}parameter>'


def invoke(name: str, *arguments: str) -> str:
    return "\n".join((f'<{DSML}invoke name="{name}">', *(arguments or ("",)), f"</{DSML}invoke>"))


CASES = [
    ("hermes", f"<tool_call>{ADD}</tool_call>", "", [("add", ARGS)]),
    ("hermes", f"Let me.\n<tool_call>\n{ADD}\n</tool_call>\n", "Let me.", [("add", ARGS)]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call> ok", "ok", [("add", ARGS)] * 2),
    ("hermes", f"<tool_call>{ADD}", "", [("add", ARGS)]),
    ("hermes", f"a <tool_call>{ADD}<|x", "a<|x", [("add", ARGS)]),
    ("hermes", "<tool_call>{bad}</tool_call> after", "<tool_call>{bad}</tool_call> after", []),
    ("hermes", f"{BAD}<tool_call>{ADD}</tool_call>", BAD, [("add", ARGS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f", "id": 7}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x}"}</tool_call>b', "b", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>b', "b", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>', "", [("f", {"s": "a\nb"})]),
    ("hermes", "<tool_call></tool_call>x", "<tool_call></tool_call>x", []),
    ("hermes", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n"
     "</function>\n</tool_call>", "", [("add", {"a": 1, "s": "2"})]),
    ("hermes", "<tool_call><function=now></function></tool_call> ok", "ok", [("now", {})]),
    ("hermes", "<tool_call><function=add></tool_call> ok", "ok", [("add", {})]),
    ("hermes", "<tool_call><function add></tool_call>", "<tool_call><function add></tool_call>", []),
    ("hermes", '<tool_call>{"name": "x", "argu', '<tool_call>{"name": "x", "argu', []),
    ("hermes", NO_CALL, NO_CALL, []),
    ("hermes", "a < b <tool <tool_cal \n end ", "a < b <tool <tool_cal \n end ", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", {"a": 2})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\\\"}}</tool_call>', "", [("f", {"s": "\\"})]),
    ("hermes", '<tool_call>{"a": "\\"</tool_call>', '<tool_call>{"a": "\\"</tool_call>', []),
    ("hermes", "plain", "plain", []),
    ("hermes", f"{UNKNOWN}<tool_call>{ADD}</tool_call>", UNKNOWN, [("add", ARGS)]),
    ("hermes", UNKNOWN_XML, UNKNOWN_XML, []),
    ("hermes", f"<tool_call>{SURROGATE}</tool_call>", "", [("f", {"s": "\ud800"})]),
    ("llama3", '{"name": "f", "parameters": {"x": [1, 2]}}', "", [("f", {"x": [1, 2]})]),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3", TWO, "", [("f", {}), ("g", {})]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {"a": {}}}\n', "", [("f", {"a": {}})]),
    ("llama3", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("llama3", '{"name": "f", "parameters": {}} and more', "and more", [("f", {})]),
    ("llama3", "[f(x=1, y=[True, null, -2.5], z={'k': 'it\\'s'}), g()]", "",
     [("f", {"x": 1, "y": [True, None, -2.5], "z": {"k": "it's"}}), ("g", {})]),
    ("llama3", '<|python_tag|>[f(s="a) ]")]', "", [("f", {"s": "a) ]"})]),
    ("llama3", "[f(x=__import__('os'))]", "[f(x=__import__('os'))]", []),
    ("llama3", "[nobody(x=1)]", "[nobody(x=1)]", []),
    ("llama3", "[1, 2]", "[1, 2]", []),
    ("llama3", "[f(1)]", "[f(1)]", []),
    ("llama3", "[f(x=" + "[" * 100, "[f(x=" + "[" * 100, []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "Hello {", "Hello {", []),
    ("llama3", "<|pyt", "<|pyt", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", {"x": 1}), ("g", {})]),
    ("mistral", 'Ok. [TOOL_CALLS] [{"name": "f", "arguments": {}}]', "Ok.", [("f", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"x": 1}), ("g", {})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"x": 1}', "", [("f", {"x": 1})]),
    ("mistral", '[TOOL_CALLS] f[ARGS] nothing', "[TOOL_CALLS] f[ARGS] nothing", []),
    ("mistral", "[TOOL_CALLS][oops", "[TOOL_CALLS][oops", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS][{"name": "rm", "arguments": {}}]', '[TOOL_CALLS][{"name": "rm", "arguments": {}}]', []),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    ("mistral", "a [TOOL] list [1]", "a [TOOL] list [1]", []),
    ("kimi", f'{KIMI}functions.f:0{ARGUMENTS}{{"x": 1}}{END}{SECTION_END}', "", [("f", {"x": 1})]),
    ("kimi", f'Ok. {KIMI}functions.f:0{ARGUMENTS}{{"x": 1}}{END}{CALL}functions.g:1{ARGUMENTS}{{}}{END}{SECTION_END}',
     "Ok.", [("f", {"x": 1}), ("g", {})]),
    ("kimi", f"{KIMI} f:12 {ARGUMENTS} {{}} {END}\n{CALL}g{ARGUMENTS}{{}}", "", [("f", {}), ("g", {})]),
    ("kimi", f"{KIMI}functions.rm:0{ARGUMENTS}{{}}", f"{KIMI}functions.rm:0{ARGUMENTS}{{}}", []),
    ("kimi", f"{SECTION} nothing", f"{SECTION} nothing", []),
    ("kimi", "a <|tool| b", "a <|tool| b", []),
    ("glm", f"Ok.\n<tool_call>add\n{pair('a', 1)}\n{pair('s', '5 ')}\n</tool_call>\n<tool_call>now\n</tool_call>\n bye",
     "Ok.bye", [("add", {"a": 1, "s": "5 "}), ("now", {})]),
    ("glm", f"<tool_call>add{pair('a', 1, '')}{pair('s', 'null', '')}</tool_call><tool_call>now</tool_call>", "",
     [("add", {"a": 1, "s": "null"}), ("now", {})]),
    ("glm", f"<tool_call>f{pair('x', '[1, {}]')}{pair('y', 'True')}{pair('z', '-1e3')}</tool_call>", "",
     [("f", {"x": [1, {}], "y": "True", "z": -1000.0})]),
    ("glm", f"<tool_call>add{pair('a', 'True')}{pair('a', 'many')}</tool_call>", "", [("add", {"a": "many"})]),
    ("glm", f"<tool_call>f{pair('x', JSON_MARK)}</tool_call>", "", [("f", json.loads(f'{{"x": {JSON_MARK}}}'))]),
    ("glm", f"<tool_call>f{pair('x', QUOTE)}{pair('y', QUOTE)}</tool_call>", "", [("f", {"x": QUOTE, "y": QUOTE})]),
    ("glm", f"<tool_call>f{pair('x', BIG)}</tool_call>", "", [("f", {"x": json.loads(BIG)})]),
    ("glm", f"<tool_call>add{pair('s', '')}{pair('a', '')}</tool_call>", "", [("add", {"s": "", "a": ""})]),
    ("glm", f"<tool_call>f{pair('x', 1)} and more", "and more", [("f", {"x": 1})]),
    ("glm", f"<tool_call>f{pair('x', 1)}<tool_call>g</tool_call>", "", [("f", {"x": 1}), ("g", {})]),
    ("glm", f"<tool_call>rm{pair('x', 1)}</tool_call>", f"<tool_call>rm{pair('x', 1)}</tool_call>", []),
    ("glm", f"the mark <tool_call> is\n<tool_call>f{pair('x', 1)}", "the mark <tool_call> is", [("f", {"x": 1})]),
    ("glm", "<tool_call>no", "<tool_call>no", []),
    ("glm", "<tool_call>now", "<tool_call>now", []),
    ("glm", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("deepseek", f"Ok.\n\n<{DSML}function_calls>\n" + invoke("add", said("a", 1, False), said("s", " 5 ", True)) + "\n"
     + invoke("now") + f"\n</{DSML}function_calls> bye", "Ok.bye", [("add", {"a": 1, "s": " 5 "}), ("now", {})]),
    ("deepseek", f"<{DSML}tool_calls>\n" + invoke("add", said("a", "{}", False), said("s", 1, False)) + "\n"
     f"</{DSML}tool_calls>", "", [("add", {"a": {}, "s": 1})]),
    ("deepseek", invoke("f", said("x", JSON_MARK, False), said("y", "null", True), said("z", "oops", False)), "",
     [("f", {"x": json.loads(JSON_MARK), "y": "null", "z": "oops"})]),
    ("deepseek", invoke("add", f'<{DSML}parameter name="s">5</{DSML}parameter>'), "", [("add", {"s": "5"})]),
    ("deepseek", f"<{DSML}tool_calls>" + invoke("f", '{"x": "1"}') + f"</{DSML}tool_calls>", "", [("f", {"x": "1"})]),
    ("deepseek", f"<{DSML}tool_calls>\n{invoke('rm')}", f"<{DSML}tool_calls>\n{invoke('rm')}", []),
    ("deepseek", f"<{DSML}tool_calls> nothing", f"<{DSML}tool_calls> nothing", []),
    ("deepseek", f'<{DSML}invoke name="f">', f'<{DSML}invoke name="f">', []),
    ("deepseek", f"a <{DSML} b <｜c", f"a <{DSML} b <｜c", []),
    ("harmony", f'{TO}f <|constrain|>json<|message|>{{"x": 1}}<|call|>', "", [("f", {"x": 1})]),
    ("harmony", '<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}', "", [("f", {})]),
    ("harmony", ' to=functions.f<|channel|>commentary<|message|>{}<|call|>', "", [("f", {})]),
    ("harmony", f"{TO}rm<|message|>{{}}<|end|>", "", []),
    ("harmony", f"{TO}f<|message|>no", "no", []),
    ("harmony", f"{TO}f<|message|><|call|>", "", [("f", {})]),
    ("harmony", f"{TO}f<|message|>", "", [("f", {})]),
    ("harmony", f"{TO}f<|message|>{{}}<|end|><|start|>assistant<|channel|>final<|message|>Done", "Done", [("f", {})]),
    ("harmony", f"Ok.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{TO}f<|message|>"
     "{}", "Ok.", [("f", {})]),
    ("harmony", "to be <|end", "to be <|end", []),
    ("harmony", "to=nobody", "to=nobody", []),
    ("harmony", "Yes", "Yes", []),
]  # fmt: skip


def tool(name: str, **types: str) -> dict:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [tool("add", a="integer", s="string"), tool("f"), tool("g"), tool("now")]


def parse(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls, as a client puts the parts together."""
    parser = PARSERS[name](TOOLS)
    items = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    text = "".join(item for item in items if isinstance(item, str))
    parts = [item for item in items if isinstance(item, CallPiece)]
    count = len({part.id for part in parts})
    calls = [[part for part in parts if part.call == i] for i in range(count)]
    for mine in calls:
        assert mine[0].name and not any(part.name for part in mine[1:]) and len({part.id for part in mine}) == 1
        assert [part.last for part in mine] == [False] * (len(mine) - 1) + [True]
    return text, [(mine[0].name, "".join(part.arguments for part in mine)) for mine in calls]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
def test_formats_whole_and_character_by_character(name, text, said, calls):
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        found_text, found = parse(name, pieces)
        assert found_text == said
        assert all(arguments.encode() for _, arguments in found)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops]}</tool_call> b', "b", '{"a": oops]}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", '{"a": "cut'),
    ("llama3", '{"name": "f", "parameters": {"x"', "", '{"x"'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1', "", '{"x": 1'),
    ("kimi", f'{KIMI}functions.f:0{ARGUMENTS}{{"x": 1', "", '{"x": 1'),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"x": 1', "", '{"x": 1'),
    ("glm", f"<tool_call>f{pair('x', 1)}<arg_key>y</arg_key><arg_value>2", "", '{"x": 1, "y": 2'),
    ("glm", f"<tool_call>f{pair('x', 1)}<arg_key>y", "", '{"x": 1'),
    ("glm", "<tool_call>f<arg_key>y</tool_call> b", "<arg_key>y</tool_call> b", "{"),
    ("deepseek", invoke("f", said("x", "abc", True))[: -len(f"</{DSML}parameter>\n</{DSML}invoke>")], "", '{"x": "abc'),
]


@pytest.mark.parametrize(("name", "text", "said", "arguments"), BROKEN)
def test_broken_arguments_are_told_as_they_were_written(name, text, said, arguments):
    for pieces in ([text], list(text)):
        assert parse(name, pieces) == (said, [("f", arguments)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 12, "s": "some text"}}</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 12, "s": "some text"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 12, "s": "some text"}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 12, "s": "some text"}'),
        ("kimi", f'{KIMI}functions.add:0{ARGUMENTS}{{"a": 12, "s": "some text"}}{END}'),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 12, "s": "some text"}'),
    ],
)
def test_arguments_are_told_as_they_are_written(name, text):
    parser = PARSERS[name](TOOLS)
    told = ""
    for at, char in enumerate(text):
        told += "".join(item.arguments for item in parser.feed(char) if isinstance(item, CallPiece))
        if '"a": 12, "s": ' in text[:at]:
            assert told and text[: at + 1].endswith(told) or told.endswith("}")
    assert json.loads(told) == {"a": 12, "s": "some text"}


WRITTEN = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments": %s, "name": "f"}</tool_call>'),
    ("hermes", "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>"),
    ("llama3", '{"name": "f", "parameters": %s}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": %s}]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
    ("kimi", f"{KIMI}functions.f:0{ARGUMENTS}%s{END}"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>"),
    ("glm", f"<tool_call>f\n{pair('x', '%s')}\n</tool_call>"),
    ("glm", f"<tool_call>f{pair('x', '%s', '')}</tool_call>"),
    ("deepseek", invoke("f", said("x", "%s", True))),
]
MARKS = ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</function>", "<function=f>", "}]",
         SECTION, CALL, ARGUMENTS, END, SECTION_END, "<|call|>", "<|channel|>",
         '"', "\\", "\n", " x ", "é", '{"name": "f", "arguments": {}}']  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(WRITTEN), st.lists(st.sampled_from(MARKS), min_size=1, max_size=4), st.booleans())
def test_what_a_string_argument_holds_is_no_mark(data, written, marks, escaped):
    name, form = written
    value = "x" + "".join(marks) + "x"
    bare = any(mark in form for mark in ("<parameter", "<arg_value", "string="))
    said = value if bare else json.dumps({"x": value}, ensure_ascii=escaped)
    text = form.replace("%s", said)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    left, calls = parse(name, pieces)
    assert left == "" and [(called, json.loads(arguments)) for called, arguments in calls] == [("f", {"x": value})]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(PARSERS)))
def test_any_text_gives_the_same_whatever_way_it_is_cut(data, name):
    bits = st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            '{"name": "f", "arguments": {"a": 1}}',
            '{"arguments": {"a": "<"}, "name": "g"}',
            "f(a=1)",
            "<function=f>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "<|python_tag|>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            f"<{DSML}",
            "tool_calls>",
            'invoke name="f">',
            f"</{DSML}invoke>",
            said("x", "[", False),
            said("x", "[", True),
            "f",
            "}",
            "]",
            ",",
            '"',
            "{",
            "[",
            " ",
            "x",
            "\n",
            ";",
        ]
    )
    text = "".join(data.draw(st.lists(bits, max_size=9)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole_text, whole_calls = parse(name, [text])
    cut_text, cut_calls = parse(name, pieces)
    assert cut_text == whole_text
    assert cut_calls == whole_calls


def test_text_before_a_call_streams_on():
    parser = PARSERS["hermes"](TOOLS)
    assert parser.feed("Hello ") == ["Hello"]
    assert parser.feed("world <tool") == [" world"]
    assert parser.feed("bar") == [" <toolbar"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("glm", f"<tool_call>add{pair('a', 1)}{pair('s', 'some text')}</tool_call>"),
     ("deepseek", invoke("add", said("a", 1, False), said("s", "some text", True)))],
)  # fmt: skip
def test_strings_without_quotes_are_told_as_they_are_written(name, text):
    parser, told = PARSERS[name](TOOLS), ""
    for at, char in enumerate(text):
        told += "".join(item.arguments for item in parser.feed(char) if isinstance(item, CallPiece))
        if text[: at + 1].endswith("some te"):
            assert told == '{"a": 1, "s": "some te'
    assert json.loads(told) == {"a": 1, "s": "some text"}


@pytest.mark.parametrize("family", ["kimi", "harmony", "mistral", "hermes", "glm", "deepseek"])
def test_every_name_that_a_tool_may_have(family):
    name = "mcp:search/web.v1-" + "x" * 100
    written = {
        "kimi": f"{KIMI}functions.{name}:0{ARGUMENTS}{{}}{END}",
        "harmony": f"<|end|><|start|>assistant{TO}{name} <|constrain|>json<|message|>{{}}",
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{{}}",
        "hermes": f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>',
        "glm": f"<tool_call>{name}</tool_call>",
        "deepseek": invoke(name),
    }[family]
    for pieces in ([written], list(written)):
        parser = PARSERS[family]([tool(name)])
        items = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
        assert "".join(item.name for item in items if isinstance(item, CallPiece)) == name
        assert not any(isinstance(item, str) and item for item in items)


def test_kimi_is_told_of_calls_by_its_own_ids():
    def call(name: str, own: str) -> dict:
        return {"id": own, "type": "function", "function": {"name": name, "arguments": {}}}

    messages = [
        {"role": "user"}, {"role": "assistant", "tool_calls": [call("f", "call_1"), call("g", "call_2")]},
        {"role": "tool", "tool_call_id": "call_2"}, {"role": "tool", "tool_call_id": "call_1"},
        {"role": "assistant", "tool_calls": [call("f", "call_3"), {"function": {"name": "g"}}]},
        {"role": "tool", "tool_call_id": "call_3"}, {"role": "tool", "tool_call_id": "unknown"},
    ]  # fmt: skip
    number_calls(messages)
    assert [each["id"] for message in messages for each in message.get("tool_calls", ())] == [
        "functions.f:0", "functions.g:1", "functions.f:2", "functions.g:3",
    ]  # fmt: skip
    told = [message["tool_call_id"] for message in messages if "tool_call_id" in message]
    assert told == ["functions.g:1", "functions.f:0", "functions.f:2", "unknown"]
