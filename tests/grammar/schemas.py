"""Random JSON schemas of the shapes people send, for tests that a model can only write what they describe."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ["name", "id", "größe", "tags", "a b", 'quo"te', "x/y", "value", "items", "city", "unit", "ok", "日本", "note"]
_PATTERNS = ["^[a-z]{2,5}$", "^[A-Z]{2}-[0-9]{3}$", r"^\d{1,4}(\.\d{2})?$", "(cat|dog)", "^(red|green|blue)+$"]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of ``seed``; every one has finite values, and most end soon."""
    rng = random.Random(seed)
    schema = _object(rng, 3) if rng.random() < 0.7 else _any(rng, 3)
    if rng.random() < 0.25:
        leaf = _any(rng, 0)
        schema = {
            "$defs": {
                "leaf": leaf,
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": {"$ref": "#/$defs/leaf"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                },
            },
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/tree"}, "extra": schema},
            "required": ["root", "extra"],
            "additionalProperties": False,
        }
    if rng.random() < 0.5:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Answer", **schema}
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [
        _string,
        _integer,
        _number,
        _enum,
        _const,
        lambda r, d: {"type": "boolean"},
        lambda r, d: {"type": "null"},
    ]
    if depth > 0:
        makers += [_object, _object, _array, _array, _union, _merged]
    return rng.choice(makers)(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 40}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    if kind == 2:
        least = rng.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 12)}
    return {"type": rng.choice(["string", ["string", "null"]]), "description": "free text", "maxLength": 20}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = rng.randrange(-1000, 1000)
    if rng.random() < 0.8:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(30, 2000)
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 5, 10])
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number"}
    if rng.random() < 0.8:
        schema["minimum"] = rng.randrange(-100, 100) / 4
        schema["maximum"] = schema["minimum"] + rng.randrange(1, 400) / 8
    return schema


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [*rng.sample(_WORDS, 3), 1, 2.5, None, True, {"k": [1]}, ""]
    return {"enum": rng.sample(values, rng.randrange(1, 6))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([*_WORDS, 0, -3, False, [1, "two"], {"a": {"b": None}}])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    schema = {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randrange(3)}
    if rng.random() < 0.25:
        schema = {"type": "array", "prefixItems": [_any(rng, depth) for _ in range(2)], "items": False, "minItems": 2}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    kind = rng.random()
    if kind < 0.7:
        schema["additionalProperties"] = False
    elif kind < 0.85:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    elif kind < 0.95:
        schema["patternProperties"] = {"^x-[a-z]{1,3}$": {"type": "boolean"}}
        schema["additionalProperties"] = False
    return schema


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": _any(rng, depth)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in ("circle", "square")
            ]
        }
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randrange(2, 4))]}


def _merged(rng: random.Random, depth: int) -> dict[str, Any]:
    part = {"type": "object", "properties": {"base": _any(rng, 0)}, "required": ["base"]}
    more = {"type": "object", "properties": {"more": _any(rng, 0)}, "required": ["more"]}
    return {"allOf": [part, more]}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}
