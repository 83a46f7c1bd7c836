"""What a tool's schema says of arguments that are written without quotes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.text.tool_calls import PARSERS, CallPiece

DECLARED = {
    "properties": {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"$ref": "#/$defs/number"}, {"type": "string"}]},
        "c": {"enum": [1, "x"]},
        "d": {"$ref": "#/$defs/loop"},
        "e": {"allOf": [{"$ref": "#/$defs/number"}]},
        "f": {"type": "string"},
        "g": {"type": ["integer", "string"]},
        "h": {"const": {"x": 1}},
    },
    "anyOf": [{"properties": {"i": {"type": "string"}}}, {"properties": {"i": {"type": "boolean"}}}],
    "$defs": {"number": {"type": "number"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "boolean"}]}},
}


def value(parameters: Any, key: str, text: str) -> Any:
    parser = PARSERS["glm"]([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    items = parser.feed(f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>")
    return json.loads("".join(item.arguments for item in items if isinstance(item, CallPiece)))[key]


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("a", "null", None), ("a", " null ", None), ("a", "nul", "nul"), ("a", "5", "5"), ("a", '"x"', '"x"'),
        ("b", "5.5", 5.5), ("b", "[]", "[]"), ("b", "None", "None"), ("c", "1", 1), ("c", "true", "true"),
        ("d", "true", True), ("e", "7", 7), ("e", "None", None), ("e", '"7"', "7"),
        ("f", "7", "7"), ("f", '"x"', '"x"'), ("f", " x\n", " x\n"), ("g", "7", 7), ("g", "7.0", 7.0),
        ("g", "7.5", "7.5"), ("g", "1e999", "1e999"), ("h", '{"x": 1}', {"x": 1}), ("i", "true", True),
        ("i", "x", "x"), ("i", "7", "7"), ("other", "7", 7), ("other", "x", "x"), ("other", "NaN", "NaN"),
        ("other", "[NaN]", "[NaN]"),
    ],
)  # fmt: skip
def test_a_schema_tells_strings_from_json(key, text, expected):
    found = value(DECLARED, key, text)
    assert found == expected and type(found) is type(expected)


def test_schemas_that_lead_in_circles_or_far_are_read_in_bounded_time():
    deep = {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(2000)}}
    far = {"properties": {"x": {"$ref": "#/$defs/d0"}}, **deep}
    for parameters in ({"$ref": "#"}, far, {"properties": 3}, {"properties": {"x": {"type": 3}}}, [], None):
        assert value(parameters, "x", "[7]") == [7]
