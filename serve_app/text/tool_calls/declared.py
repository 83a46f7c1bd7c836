"""Which types of values a tool's schema declares for its parameters, for formats that write values without quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from serve_app.text.tool_calls.base import json_at, json_text

# JSON's types, "integer" being a "number" as well.
KINDS = frozenset(("string", "null", "boolean", "integer", "number", "array", "object"))
NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?"
_NUMBER = re.compile(NUMBER)
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORDS = re.compile("NaN|Infinity")
_INTEGER = re.compile(r"-?[0-9]+")
# How far references and parts of schemas are followed; what lies deeper may be anything.
MAX_DEPTH = 64
# How models that think in Python write three values.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def parameter_kinds(parameters: Any, key: str) -> frozenset[str]:
    """The types that the schema ``parameters`` allows for ``key``: a few too many rather than one too few."""
    known: dict[int, frozenset[str]] = {}
    found = [kinds(declared, parameters, known) for declared in _declared(parameters, parameters, key, set(), 0)]
    return frozenset().union(*found) if found else KINDS


def kinds(schema: Any, root: Any, known: dict[int, frozenset[str]] | None = None, depth: int = 0) -> frozenset[str]:
    """The types that values of ``schema``, a part of ``root``, can have: a few too many rather than one too few.

    ``known``: those of parts looked at before, so that references cost nothing twice.
    """
    known = {} if known is None else known
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return KINDS
    if id(schema) in known:
        return known[id(schema)]
    found = known[id(schema)] = KINDS  # where a reference leads back here
    named = schema.get("type")
    if isinstance(named, (str, list)):
        names = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
        found &= names | ({"integer"} if "number" in names else set())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= frozenset(map(kind_of, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(kinds(branch, root, known, depth + 1) for branch in schema[key]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= kinds(part, root, known, depth + 1)
    if "$ref" in schema:
        found &= kinds(resolve(root, schema["$ref"]), root, known, depth + 1)
    known[id(schema)] = found
    return found


def kind_of(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}
    return names.get(type(value), "object")


def resolve(root: Any, reference: Any) -> Any:
    """What a JSON pointer in ``root`` names; None for anything else."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            return None
    return found


def typed(text: str, allowed: frozenset[str]) -> str:
    """The JSON text of the value that ``text`` says where a value may have the types ``allowed``: JSON where it is of
    one of them, or else a string; where it may be no string, what comes nearest."""
    bare = text.strip()
    if "string" not in allowed and bare in _PYTHON:
        return _PYTHON[bare]
    if _NUMBER.fullmatch(bare):
        # As it stands: a float of Python's could not hold every number.
        kind, said = "integer" if _INTEGER.fullmatch(bare) or float(bare).is_integer() else "number", bare
    else:
        value, end = json_at(bare)
        if end is None or end != len(bare) or isinstance(value, str):
            return json_text(value if end == len(bare) and "string" not in allowed else text)
        kind = kind_of(value)
        try:
            said = json_text(value)
        except ValueError:
            # A number that a float can't hold is JSON, and a word like NaN is none.
            if _WORDS.search(_STRINGS.sub("", bare)):
                return json_text(text)
            said = bare
    return said if kind in allowed or "string" not in allowed else json_text(text)


def _declared(schema: Any, root: Any, key: str, seen: set[int], depth: int) -> Iterator[Any]:
    """Every place where an object's schema says what its property ``key`` is."""
    if not isinstance(schema, dict) or id(schema) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(schema))
    properties, rest = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, dict) and key in properties:
        yield properties[key]
    elif isinstance(rest, dict):
        yield rest
    for name in ("anyOf", "oneOf", "allOf"):
        for branch in schema[name] if isinstance(schema.get(name), list) else ():
            yield from _declared(branch, root, key, seen, depth + 1)
    if "$ref" in schema:
        yield from _declared(resolve(root, schema["$ref"]), root, key, seen, depth + 1)
