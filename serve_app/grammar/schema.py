"""What is checked about a JSON schema before a grammar is made of it: its size, where its references lead, and whether
any finite value fits it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from serve_app.grammar import GrammarError
from serve_app.grammar.limits import (
    MAX_ENUM_VALUES,
    MAX_GRAMMAR_BYTES,
    MAX_OPTIONAL_PROPERTIES,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_DEPTH,
)
from serve_app.text.tool_calls.declared import resolve

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")


def check_schema(schema: dict[str, Any]) -> None:
    """Raises :class:`GrammarError`. What the grammar library can't express it names itself, when it compiles."""
    size = len(json.dumps(schema, ensure_ascii=False).encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the schema has {size} bytes; {MAX_GRAMMAR_BYTES} is the most")
    if "x-guidance" in schema:
        raise GrammarError("the keyword x-guidance is not supported; leave it out")
    nodes = list(_nodes(schema))
    values = 0
    for node in nodes:
        enum, pattern = node.get("enum"), node.get("pattern")
        values += len(enum) if isinstance(enum, list) else 0
        patterns = [pattern, *node["patternProperties"]] if _mapping(node, "patternProperties") else [pattern]
        if any(isinstance(p, str) and len(p) > MAX_REGEX_CHARS for p in patterns):
            raise GrammarError(f"a pattern has more than {MAX_REGEX_CHARS} characters; make it shorter")
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise GrammarError(f"$ref {reference[:80]!r} leads out of the schema; copy what it names into $defs")
        _check_counts(node)
    if values > MAX_ENUM_VALUES:
        raise GrammarError(f"its enums have {values} values; {MAX_ENUM_VALUES} is the most")
    if not _has_finite_value(schema, nodes):
        raise GrammarError("no finite value fits it: a $ref leads back to itself; make what it passes optional")


def _mapping(node: dict[str, Any], key: str) -> bool:
    return isinstance(node.get(key), dict)


def _children(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in _MAPS:
        if _mapping(node, key):
            yield from (child for child in node[key].values() if isinstance(child, dict))
    for key in (*_LISTS, *_SINGLE):
        value = node.get(key)
        yield from (child for child in (value if isinstance(value, list) else [value]) if isinstance(child, dict))


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every subschema; raises where they are nested too deep."""
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        yield from level
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise GrammarError(f"it is nested deeper than {MAX_SCHEMA_DEPTH} levels; use $defs and $ref, or make it flatter")


def _check_counts(node: dict[str, Any]) -> None:
    # Keys that only additionalProperties or patternProperties allow may be written twice, and then count once.
    required = node.get("required")
    names = set(map(str, required)) if isinstance(required, list) else set()
    optional = len(node["properties"].keys() - names) if _mapping(node, "properties") else 0
    if optional > MAX_OPTIONAL_PROPERTIES:
        raise GrammarError(
            f"an object has {optional} optional properties and {MAX_OPTIONAL_PROPERTIES} is the most; make some "
            "required, or put them into objects of their own"
        )
    least = node.get("minProperties")
    if isinstance(least, (int, float)) and least > max(1, len(names)):
        raise GrammarError("minProperties of 2 or more is not supported; name the properties and make them required")


def _has_finite_value(root: dict[str, Any], nodes: list[dict[str, Any]]) -> bool:
    """Least fixed point: a schema has a finite value once everything it cannot do without has one."""
    finite: set[int] = set()

    def fits(schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in finite

    def settled(node: dict[str, Any]) -> bool:
        if "$ref" in node:
            target = resolve(root, node["$ref"])
            if isinstance(target, dict) and not fits(target):
                return False
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list) and node[key] and not any(fits(option) for option in node[key]):
                return False
        if isinstance(node.get("allOf"), list) and not all(fits(part) for part in node["allOf"]):
            return False
        kinds = node.get("type", ["object", "array"])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds == ["object"] and isinstance(node.get("required"), list):
            properties = node["properties"] if _mapping(node, "properties") else {}
            rest = node.get("additionalProperties")
            if not all(fits(properties.get(str(name), rest)) for name in node["required"]):
                return False
        least = node.get("minItems", 0)
        if kinds == ["array"] and isinstance(least, (int, float)) and least > 0:
            first = node.get("prefixItems")
            items = first[: int(least)] if isinstance(first, list) else []
            return all(fits(item) for item in items) and (len(items) >= least or fits(node.get("items")))
        return True

    pending = nodes
    while pending:
        left = []
        for node in pending:
            if settled(node):
                finite.add(id(node))
            else:
                left.append(node)
        if len(left) == len(pending):
            break
        pending = left
    return id(root) in finite
