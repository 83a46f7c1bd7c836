"""Readers of single fields: strict about types, lenient about null and absence, and clear about what would be
right."""

from __future__ import annotations

import math
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.body import json_type


def refuse(name: str, expected: str, value: Any) -> InvalidInput:
    """The error for a field of the wrong type; a number in quotes gets its own advice."""
    hint = ""
    if isinstance(value, str) and expected.startswith(("an integer", "a number")):
        hint = " (a number in quotes is a string; leave out the quotes)" if _numeric(value) else ""
    return InvalidInput(f"{name} must be {expected}, not {json_type(value)}{hint}.", param=name)


def _numeric(text: str) -> bool:
    try:
        float(text[:64])
    except ValueError:
        return False
    return True


def number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    """A finite number in [``low``, ``high``], or ``None`` if the field is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(name, f"a number between {low:g} and {high:g}", value)
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidInput(f"{name} must be between {low:g} and {high:g}, got {_shown(value)}.", param=name)
    return float(value)


def integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer in [``low``, ``high``]; 5.0 counts as 5, as in JSON Schema. ``None`` if absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(name, f"an integer between {low} and {high}", value)
    if not low <= value <= high:
        raise InvalidInput(f"{name} must be an integer between {low} and {high}, got {_shown(value)}.", param=name)
    return value


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= 32 else text[:29] + "..."


def boolean(body: dict[str, Any], name: str) -> bool | None:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise refuse(name, "true or false", value)


def string(body: dict[str, Any], name: str, *, limit: int | None = None) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    return text(value, name, limit=limit)


def text(value: Any, name: str, *, limit: int | None = None) -> str:
    """``value`` as a string; that it can be encoded in UTF-8 was checked with the whole body."""
    if not isinstance(value, str):
        raise refuse(name, "a string", value)
    if limit is not None and len(value) > limit:
        raise InvalidInput(f"{name} must have at most {limit} characters, got {len(value)}.", param=name)
    return value


def choice(body: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(f'"{a}"' for a in allowed)
        raise InvalidInput(f"{name} must be one of {listed}.", param=name)
    return value


def objects(value: Any, name: str, *, limit: int) -> list[dict[str, Any]]:
    """``value`` as an array of objects with at most ``limit`` items."""
    if not isinstance(value, list):
        raise refuse(name, "an array", value)
    if len(value) > limit:
        raise InvalidInput(f"{name} must have at most {limit} items, got {len(value)}.", param=name)
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise refuse(f"{name}[{i}]", "an object", item)
    return value


def texts(value: Any, name: str, *, limit: int) -> list[str]:
    """A string or a non-empty array of strings, as a list."""
    if isinstance(value, str):
        return [text(value, name)]
    if not isinstance(value, list):
        raise refuse(name, "a string or an array of strings", value)
    if not value:
        raise InvalidInput(f"{name} must not be an empty array.", param=name)
    if len(value) > limit:
        raise InvalidInput(
            f"{name} must have at most {limit} items, got {len(value)}; send several requests.", param=name
        )
    return [text(item, f"{name}[{i}]") for i, item in enumerate(value)]
