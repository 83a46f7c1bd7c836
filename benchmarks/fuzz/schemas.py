"""Grammars that clients send: JSON schemas, regular expressions, choices and grammars in Lark or GBNF."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz.bodies import VALUES, _tokenizer
from serve_app.api.errors import ApiError
from serve_app.api.fields.body import check_object
from serve_app.api.fields.formats import parse_format
from serve_app.api.types import GenerateRequest
from serve_app.grammar.answer import answer_grammar, token_rule
from serve_app.sampling_params import SamplingParams

LONGEST_S = 20.0  # of a check, on the slowest machine; limits on work are counted, not timed
KEYWORDS = (
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const", "anyOf", "oneOf",
    "allOf", "$ref", "$defs", "definitions", "pattern", "format", "minLength", "maxLength", "minimum", "maximum",
    "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties", "patternProperties", "not", "if", "default",
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "city", "größe", "a b", "", '"', "$x"])
LEAVES: st.SearchStrategy[Any] = st.sampled_from([
    "string", "integer", "number", "object", "array", "null", "boolean", "date", "uuid", "^[a-z]{2,5}$", "(a|b)*", "#",
    "#/$defs/a", "#/properties/a", 0, 1, 3, 250, 2**31, -1, 0.5, True, False, None, [], {}, ["a", "b"],
    ["string", "null"],
])  # fmt: skip


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    value = st.one_of(LEAVES, inner, st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3))
    return st.dictionaries(st.sampled_from(KEYWORDS), value, max_size=5)


SCHEMAS = st.recursive(LEAVES, _schemas, max_leaves=12)
# Right schemas whose counts grow: what a parser's limits are for.
WIDE = st.integers(1, 1100).map(
    lambda n: {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}
)
CHOICES = st.one_of(
    st.integers(1, 1100).map(lambda n: [f"choice {i}" for i in range(n)]), st.lists(st.text(max_size=9), max_size=5)
)
PATTERNS = st.one_of(
    st.text("ab()[]{}|*+?^$.\\,0123456789-dwsbB", max_size=24),
    st.integers(1, 2000).map(lambda n: f"a{{{n}}}"),
    st.sampled_from(["(a+)+$", "(a|a)*b", "[^]", "(?=a)", "\\1", "(?P<x>a)", "\\b", "a{1,4096}{1,4096}", "\\p{L}+"]),
)
GRAMMARS = st.one_of(
    st.sampled_from([
        'start: "a" | "b"', 'root ::= "a"', 'root ::= root "a" | "b"', "start: start", "start: /a+/",
        'root ::= [a-z]+ ws\nws ::= " "',
        "start: %json {}", 'start: "a"{1000}', "start: <[1]>", "start: <|im_end|>", "%import common.WORD\nstart: WORD",
    ]),
    st.text('start:roo="ab/|()*+?[]{}%\n ', max_size=40),
)  # fmt: skip
FORMATS = st.one_of(
    st.tuples(st.just("guided_json"), st.one_of(SCHEMAS, WIDE, VALUES)),
    st.tuples(st.just("guided_choice"), st.one_of(CHOICES, VALUES)),
    st.tuples(st.just("guided_regex"), st.one_of(PATTERNS, VALUES)),
    st.tuples(st.just("guided_grammar"), st.one_of(GRAMMARS, VALUES)),
)


def read_format(field: str, value: Any) -> None:
    """Refused with a reason, or a grammar; and in time."""
    began = time.monotonic()
    try:
        found = parse_format(check_object({field: value}))
        if found is not None:
            request = GenerateRequest(
                model="m",
                messages=None,
                prompt="x",
                raw=True,
                sampling=SamplingParams(max_tokens=5),
                answer_format=found,
            )
            assert answer_grammar(request, token=token_rule(_tokenizer()))
    except ApiError as error:
        assert 400 <= error.status < 500
        str(error).encode()
    assert time.monotonic() - began < LONGEST_S
