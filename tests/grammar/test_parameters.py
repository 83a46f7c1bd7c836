"""Calls whose arguments are written one by one: what the grammar lets through, the parser reads as the schema says."""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from serve_app.api.errors import InvalidInput
from serve_app.api.openai.read import parse_chat
from serve_app.api.types import ChoiceDone, ReasoningDelta, TextDelta, ToolCallDelta
from serve_app.engine.constrain import Masks
from serve_app.grammar.answer import answer_grammar, token_rule
from serve_app.grammar.limits import parser_limits
from serve_app.grammar.matcher import Grammars
from serve_app.text.output import open_output
from serve_app.text.reasoning import MARKS
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_calls import PARSERS, CallPiece
from tests import tiny
from tests.grammar.schemas import random_schema
from tests.grammar.test_generate import add, run

D = "｜DSML｜"
FAMILIES = ("glm", "deepseek")
BYTES = LLTokenizer("byte")
ENDS = ("</arg_value>", f"</{D}parameter>", '"', "}", "]", "null")
BITS = (*ENDS, "5", "true", "a", "{", "<", "</", " ", "日", "-1.5e3", "[1", "\n", '"x"', "<tool_call>", "</tool_call>")


def request_of(parameters: dict[str, Any], **body: Any):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    chat = {"model": "@cf/a/b", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    return parse_chat({**chat, "tool_choice": "required", "parallel_tool_calls": False, **body})


def grammar_of(family: str, parameters: dict[str, Any], **body: Any) -> str:
    built = answer_grammar(request_of(parameters, **body), token=lambda _: None, family=family)
    assert built is not None
    return built


def accepts(text: str, written: str) -> bool:
    matcher = LLMatcher(BYTES, text, log_level=0, limits=parser_limits())
    return all(matcher.consume_token(byte) for byte in written.encode()) and matcher.is_accepting()


def written(text: str, rng: random.Random, most: int = 4000) -> str | None:
    """Something that a grammar lets through, drawn from what looks like marks and JSON; None for no end in sight."""
    matcher = LLMatcher(BYTES, text, log_level=0, limits=parser_limits())
    bits = allocate_token_bitmask(1, BYTES.vocab_size)
    out = bytearray()
    while len(out) < most:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            return out.decode()
        chosen = list(rng.choice(ENDS if rng.random() < 0.5 else BITS).encode())
        if rng.random() > 0.7 or matcher.validate_tokens(chosen) < len(chosen):
            fill_next_token_bitmask(matcher, bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:256]).tolist()
            assert allowed, (matcher.get_error(), out)
            chosen = [rng.choice([byte for byte in allowed if 32 <= byte < 127] or allowed)]
        assert matcher.consume_tokens(chosen)
        out += bytes(chosen)
    return None


def read(family: str, parameters: dict[str, Any], pieces: list[str]) -> tuple[str, list[str]]:
    parser = PARSERS[family]([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    items = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    calls = {item.call: "" for item in items if isinstance(item, CallPiece)}
    for item in items:
        if isinstance(item, CallPiece):
            calls[item.call] += item.arguments
    return "".join(item for item in items if isinstance(item, str)), list(calls.values())


def as_templates_write(family: str, arguments: dict[str, Any], line: str = "") -> str:
    """A call in a chat template of GLM 4.5 (with ``line``) or 4.7, or in DeepSeek V4's encoding."""
    out = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if family == "glm":
            out.append(f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}")
        else:
            kind = str(isinstance(value, str)).lower()
            out.append(f'<{D}parameter name="{key}" string="{kind}">{text}</{D}parameter>')
    if family == "glm":
        return f"<tool_call>f{line}{''.join(out)}</tool_call>"
    body = "\n".join(out)
    return f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n{body}\n</{D}invoke>\n</{D}tool_calls>'


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_grammar_allows_is_read_and_validates(family):
    done, refused = 0, []
    for seed in range(150):
        schema = random_schema(seed)
        if schema.get("type") != "object":
            continue
        try:
            text = grammar_of(family, schema)
        except InvalidInput as error:
            refused.append(str(error))
            continue
        rng = random.Random(seed)
        for _ in range(2):
            said = written(text, rng)
            if said is None:
                continue
            rest, calls = read(family, schema, [said])
            assert rest == "" and len(calls) == 1, said
            assert read(family, schema, list(said)) == (rest, calls)
            arguments = json.loads(calls[0])
            jsonschema.Draft202012Validator(schema).validate(arguments)
            done += 1
    assert done > 150
    # By name, and only what the format can't say.
    known = ("patternProperties", 'quo"te', "quotes", "another type", "no text fits it", "put them into its options")
    assert len(refused) < 30 and all(any(word in reason for word in known) for reason in refused), refused


PLAIN = {"properties": {
    "s": {"type": "string"}, "n": {"type": ["string", "null"], "maxLength": 30}, "i": {"type": "integer"},
    "u": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "integer"}}]},
    "o": {"$ref": "#/$defs/o"}, "p": {"type": "string", "pattern": "^a|b$"}, "d": {"type": "string", "format": "date"},
    "x": {}}, "$defs": {"o": {"type": "object", "properties": {"k": {"type": "string"}}}}}  # fmt: skip
ACCEPTED = [
    {}, {"s": ""}, {"s": " 5 "}, {"s": "null"}, {"s": "a </tool_call> < </arg_valu\n<tool_call>"},
    {"s": '日本 "q" \\'}, {"n": None}, {"n": "nul"}, {"n": '{"'}, {"n": '"', "x": 1},
    {"n": "5"}, {"i": -3}, {"u": "x[1]"}, {"u": [1, 2]},
    {"o": {"k": "</arg_value>"}}, {"p": "ax"}, {"p": "xb"}, {"d": "2024-02-29"}, {"x": 1.5}, {"x": "word"},
    {"x": {"a": [None]}}, {"s": "a", "n": "b", "i": 1, "u": [], "o": {}, "p": "a", "d": "1999-12-31", "x": True},
]  # fmt: skip
REJECTED = [
    {"i": 1.5}, {"i": "1"}, {"u": ""}, {"u": ["x"]}, {"p": "xa"}, {"d": "2024-13-01"}, {"n": "x" * 31}, {"z": 1},
    {"o": "k"},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("line", ["", "\n"])
def test_what_chat_templates_write_is_what_the_grammar_allows(family, line):
    text = grammar_of(family, PLAIN)
    for arguments in ACCEPTED:
        said = as_templates_write(family, arguments, line)
        assert accepts(text, said), said
        assert [json.loads(call) for call in read(family, PLAIN, list(said))[1]] == [arguments]
    for arguments in REJECTED:
        if not (family == "glm" and arguments == {"i": "1"}):  # which stands there as 1 does
            assert not accepts(text, as_templates_write(family, arguments, line)), arguments


def test_a_string_does_not_read_as_something_else():
    text = grammar_of("glm", {"properties": {"u": {"type": ["string", "number", "array", "boolean"]}}})
    for said, fits in (("1", 1), ("-2.5e3", -2500.0), ("true", True), ("[1]", 1), (" [x", 0), ("[x", 0), ("1x", 1),
                       (" true", 0), ("True", 1), ("null", 1), ("{", 1), ("", 1)):  # fmt: skip
        call = f"<tool_call>f<arg_key>u</arg_key><arg_value>{said}</arg_value></tool_call>"
        assert accepts(text, call) is bool(fits), said


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_and_none(family):
    text = grammar_of(family, PLAIN, parallel_tool_calls=True)
    one = as_templates_write(family, {"s": "x"}).strip()
    call = one[one.index("<｜DSML｜invoke") : one.index("\n</｜DSML｜tool_calls>")] if family == "deepseek" else one
    two = one.replace(call, call + ("\n" if family == "deepseek" else "") + call)
    assert accepts(text, one) and accepts(text, two) and read(family, PLAIN, [two]) == ("", ['{"s": "x"}'] * 2)
    assert not accepts(grammar_of(family, PLAIN), two)
    free = grammar_of(family, {})
    assert accepts(free, as_templates_write(family, {"any key": ["x"], "b": "text"}))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "keyword anyOf is not supported"),
        ({"properties": {"a<b": {}}}, "can't write the name of the property 'a<b'"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "keyword not is not supported where a value may be"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}, "keyword minimum is not supported"),
        ({"properties": {"a": {"type": "string", "format": "uri"}}}, "format 'uri' of a string is not supported"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "look-around"),
        ({"properties": {"a": {"enum": ["</arg_value>"]}}, "required": ["a"]}, "no text fits it"),
        ({"properties": {"a": {"type": ["null", "string"], "pattern": "a", "maxLength": 5000}}}, "length above 1000"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}}, "must lead into"),
        ({"properties": {}, "required": ["z"]}, "requires 'z'"),
        ({"properties": {"a": {"type": "foo"}}}, "Invalid type: foo"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(parameters, words):
    with pytest.raises(InvalidInput, match=words) as refused:
        grammar_of("glm", parameters)
    assert refused.value.param == "tools[0].function.parameters"
    # Where the model may choose, and nothing was promised, any arguments will do.
    assert grammar_of("glm", parameters, tool_choice="auto", response_format={"type": "json_object"})


@pytest.fixture(scope="module")
def marked(folder, tmp_path_factory):
    """The folder of the random model with the marks of both families among its control tokens."""
    path = tmp_path_factory.mktemp("marked")
    shutil.copytree(folder, path, dirs_exist_ok=True)
    spec = json.loads((path / "tokenizer.json").read_text("utf-8"))
    names = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", D)
    known = {token["content"] for token in spec["added_tokens"]}
    # In the place of learned tokens, whose number a model has already.
    spare = sorted((index, name) for name, index in spec["model"]["vocab"].items() if name not in known)[-len(names) :]
    for (index, old), name in zip(spare, names, strict=True):
        spec["model"]["merges"] = [
            m for m in spec["model"]["merges"] if "".join(m if isinstance(m, list) else m.split(" ")) != old
        ]
        del spec["model"]["vocab"][old]
        spec["model"]["vocab"][name] = index
        spec["added_tokens"].append({"id": index, "content": name, "single_word": False, "lstrip": False,
                                     "rstrip": False, "normalized": False, "special": name == D})  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(spec), "utf-8")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_thinks_and_calls_with_its_control_tokens(family, marked, model):
    """From the request to events: a random model under the grammar writes calls that validate."""
    tokenizer = Tokenizer(marked)
    marks = PARSERS[family].markers
    assert all(tokenizer.token_id(mark) is not None for mark in marks)
    engine = tiny.make_engine(model, num_blocks=400, max_num_seqs=8)
    engine.runner.masks = Masks(Grammars(marked, model.vocab_size, model.eos_token_ids))
    schema = {"properties": {
        "s": {"type": "string", "maxLength": 12}, "n": {"type": ["string", "null"], "maxLength": 9},
        "i": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}, "required": ["s", "i"],
        "additionalProperties": False}  # fmt: skip
    request = request_of(schema)
    text = answer_grammar(request, token=token_rule(tokenizer), family=family, marks=MARKS["qwen3"], inside=True)
    assert f"<[{tokenizer.token_id(marks[-1])}]>" in text
    # A random model would never stop to think; the mark is among its tokens or it is text.
    closing = {i: 12.0 for i in (tokenizer.token_id(m) for m in (*marks, "</think>")) if i is not None}
    closing |= dict.fromkeys(tokenizer.encode("</think>", add_special_tokens=False).tolist(), 12.0)
    for seed in range(8):
        add(engine, str(seed), text, logit_bias=closing, max_tokens=400)
    tokens, ends, errors = run(engine, 20_000)
    assert set(ends.values()) <= {"stop", "length"}, errors
    finished = [name for name, end in ends.items() if end == "stop"]
    assert len(finished) >= 4
    prompt = tokenizer.encode_prompt("<think>\n")
    for name in finished:
        stream = open_output(tokenizer, request, prompt, tool_parser=family, reasoning_parser="qwen3")
        events = [event for token in tokens[name] for event in stream.feed([token])] + stream.finish()
        calls = [event for event in events if isinstance(event, ToolCallDelta)]
        assert calls[0].name == "f" and calls[-1].last and events[-1] == ChoiceDone(0, "tool_calls")
        assert not "".join(event.text for event in events if isinstance(event, TextDelta))
        assert all(D not in event.text for event in events if isinstance(event, ReasoningDelta))
        jsonschema.Draft202012Validator(schema).validate(json.loads("".join(call.arguments for call in calls)))
