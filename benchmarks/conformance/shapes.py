"""Shapes of JSON: what a value must look like, written as the value it looks like.

A dict asks for its keys (``"name?"`` for one that may be missing), a list of one shape for an array of such items, a
type for a value of that type, a function for what it finds no problem in, and anything else for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shape = Any
Check = Callable[[Any], str | None]
NUMBER = (int, float)


def problem(value: Any, shape: Shape, where: str = "") -> str | None:
    """What is wrong with ``value``, or None."""
    at = where or "the body"
    if isinstance(shape, dict):
        return _object(value, shape, where, at)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at} is no array"
        return next((p for i, item in enumerate(value) if (p := problem(item, shape[0], f"{where}[{i}]"))), None)
    if isinstance(shape, (type, tuple)):
        wrong = not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool)
        return f"{at} is {_shown(value)}, no {_named(shape)}" if wrong else None
    if callable(shape):
        told: str | None = shape(value)
        return None if told is None else f"{at} {told}"
    return None if value == shape else f"{at} is {_shown(value)} instead of {_shown(shape)}"


def any_of(*shapes: Shape) -> Check:
    def check(value: Any) -> str | None:
        return None if any(problem(value, shape) is None for shape in shapes) else f"is {_shown(value)}"

    return check


def filled(shape: Shape) -> Check:
    """An array of such items that is not empty, or text that is not."""

    def check(value: Any) -> str | None:
        if not value:
            return "is empty"
        return problem(value, [shape] if isinstance(value, list) else shape)

    return check


def length(count: int, shape: Shape) -> Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, list) or len(value) != count:
            return f"has not {count} items"
        return problem(value, [shape])

    return check


def _object(value: Any, shape: dict[str, Shape], where: str, at: str) -> str | None:
    if not isinstance(value, dict):
        return f"{at} is no object"
    for key, inner in shape.items():
        name = key.removesuffix("?")
        if name not in value:
            if name == key:
                return f"{at} lacks {name}"
            continue
        if told := problem(value[name], inner, f"{where}.{name}" if where else name):
            return told
    return None


def _named(shape: Any) -> str:
    return " or ".join(kind.__name__ for kind in (shape if isinstance(shape, tuple) else (shape,)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
