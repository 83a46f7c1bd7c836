"""Schemas, expressions and grammars that can't be used are refused in bounded time, and told what to do about it."""

from __future__ import annotations

import asyncio
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.grammar import GrammarError
from serve_app.grammar.check import check_grammar
from serve_app.grammar.limits import parser_limits
from serve_app.grammar.rules import choice_rule, grammar, json_rule, lark_grammar, regex_rule
from serve_app.grammar.schema import check_schema


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def optional(count, suffix="", **more):
    return {"type": "object", "properties": {f"p{i}{suffix}": {"type": "string"} for i in range(count)}, **more}


def loop(**more):
    return {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, **more}}, "$ref": "#/$defs/n"}


def check(schema):
    check_schema(schema)
    check_grammar(grammar(json_rule(schema), {}))


REFUSED = [
    ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems are not supported"),
    ({"not": {"type": "string"}}, "not are not supported"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if, then are not"),
    ({"$dynamicRef": "#x"}, "dynamicRef"),
    ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties"),
    ({"type": "string", "format": "binary"}, "Unknown format: binary"),
    ({"type": "foo"}, "Invalid type: foo"),
    ({"type": "object", "properties": []}, "properties must be an object"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "(a"}, "unclosed group"),
    ({"type": "string", "pattern": "a" * 5000}, "more than 4096"),
    ({"patternProperties": {"a" * 5000: {}}}, "more than 4096"),
    ({"$ref": "https://example.com/schema.json"}, "leads out of the schema"),
    ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "leads out of the schema"),
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "#"}, "no finite value"),
    (loop(required=["c"]), "no finite value"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value"),
    ({"anyOf": [{"$ref": "#"}]}, "no finite value"),
    (nested(65), "nested deeper"),
    ({"enum": list(range(5000))}, "4096 is the most"),
    ({"description": "x" * 70_000}, "65536 is the most"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ({"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(8)]}, "too much"),
    (optional(501), "501 optional properties and 500 is the most"),
    ({"properties": {"a": {"items": optional(600)}}}, "600 optional properties"),
    ({"anyOf": [optional(450, str(i)) for i in range(4)]}, "allows too much at one place"),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 10}]}, "oneOf"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_schemas_that_cannot_be_used(schema, words):
    with pytest.raises(GrammarError, match=words) as refused:
        check(schema)
    assert len(str(refused.value)) < 260 and "x-guidance" not in str(refused.value).replace("keyword x-guidance", "")


ALLOWED = [
    {},
    {"type": "object"},
    loop(),
    {"type": "array", "items": {"$ref": "#"}},
    {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a/b": {"type": "integer"}},
     "$ref": "#/definitions/a~1b"},
    {"type": "string", "format": "date-time", "title": "t", "default": "d", "examples": [1], "frobnicate": 3},
    {"type": "string", "pattern": "^(a|b)*a(a|b){40}$"},
    {"type": "string", "maxLength": 10**8},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**5, "maxItems": 10**6},
    {"enum": [f"value {i}" for i in range(4000)]},
    nested(60),
    optional(500),
    optional(500, additionalProperties=False),
    optional(1000, required=[f"p{i}" for i in range(500)]),
    {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 50_000} for i in range(50)}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ALLOWED)
def test_schemas_that_can(schema):
    check(schema)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("(a", "unclosed group"), ("(?=a)b", "look-around"), (r"(a)\1", "backreference"), ("a$b", "lookarounds"),
     ("[z-a]", "invalid"), (r"\bfoo\b", "lookarounds")],
)  # fmt: skip
def test_regexes_that_cannot_be_used(pattern, words):
    with pytest.raises(GrammarError, match=words):
        check_grammar(grammar(regex_rule(pattern), {}))


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "^a|b", "(x+x+)+y", "a/b", '[/#"]+', "(?i)abc", "", "x\ny", r"\p{L}{2,4}"]
)
def test_regexes_that_can(pattern):
    check_grammar(grammar(regex_rule(pattern), {}))


def accepts(text, written):
    """Whether a grammar takes ``written``, byte by byte, and may end there."""
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=parser_limits())
    return all(matcher.consume_token(byte) for byte in written.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("count", [1, 2, 1000, 1024])
def test_choices_are_literal(count):
    odd = ["".join(map(chr, range(1, 128))), "é/#\n", "yes", "yes, sir", "日本 😀 \u2028", "\\b<|end|>", "x" * 4000]
    choices = [*odd, *(f"item {i}" for i in range(count))][-1024:]
    text = grammar(choice_rule(choices), {})
    check_grammar(text)
    for choice in [*choices[:7], *choices[-3:]]:
        assert accepts(text, choice)
        assert not accepts(text, choice + "!") and not accepts(text, choice[:-1] + "%")


@pytest.mark.parametrize(
    ("text", "words"),
    [("start: nothing", "unknown name"), ("start: x[max_tokens=3]\nx: /a*/", "max_tokens"), ("root ::= (", "neither"),
     ("", "."), ('start: a\na: a "x"', "no text fits")],
)  # fmt: skip
def test_grammars_that_cannot_be_used(text, words):
    with pytest.raises(GrammarError, match=words):
        check_grammar(lark_grammar(text))


def test_gbnf_and_lark():
    check_grammar(lark_grammar('root ::= "a" [0-9]+ ws\nws ::= [ ]*'))
    check_grammar(lark_grammar('start: "a" NUM\nNUM: /[0-9]+/'))


def test_a_check_lets_others_work():
    """The event loop turns while another thread compiles."""
    schema = {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}-{j}" for j in range(20)]} for i in range(150)}}
    text = grammar(json_rule(schema), {})
    assert len(json.dumps(schema)) > 20_000

    async def main():
        turns = 0
        work = asyncio.create_task(asyncio.to_thread(check_grammar, text))
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        await work
        return turns

    assert asyncio.run(main()) > 10
