"""From bytes to a JSON object, by content and not by label: clients post JSON as text/plain and as form
data."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import orjson

from serve_app.api.errors import BodyTooLarge, InvalidInput, MissingBody, Timeout

BODY_LIMIT = 16 * 1024 * 1024
DEPTH_LIMIT = 64
# Of JSON in a string of a body or of an answer, which is no part of the body's own levels.
INNER_DEPTH_LIMIT = 128
# Values of one body, keys not counted. No task takes more, and looking through them stays a matter of milliseconds.
VALUE_LIMIT = 1_000_000
_PLAIN = frozenset({int, bool, type(None)})
_NUMBERS = frozenset({int, bool, float})


async def read_bounded(
    chunks: AsyncIterator[bytes],
    content_length: str | None = None,
    *,
    limit: int = BODY_LIMIT,
    timeout: float = 60.0,
) -> bytes:
    """All of ``chunks``, at most ``limit`` bytes within ``timeout`` seconds; raises `BodyTooLarge` or
    `Timeout`.

    A declared length over the limit is refused before anything is read; a false declaration does not help.
    """
    if content_length and content_length.strip().isdigit() and int(content_length[:20]) > limit:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(limit)
                parts.append(chunk)
    except TimeoutError:
        raise Timeout(f"The request body did not arrive within {timeout:g} seconds.") from None
    return b"".join(parts)


def parse_body(data: bytes, *, limit: int = BODY_LIMIT) -> dict[str, Any]:
    """The JSON object in ``data``.

    Raises `BodyTooLarge`, `MissingBody` for nothing at all, and `InvalidInput` for anything that is not one
    JSON object of at most `DEPTH_LIMIT` levels in valid UTF-8 with finite numbers. A byte order mark is
    ignored.
    """
    if len(data) > limit:
        raise BodyTooLarge(limit)
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data or data.isspace():
        raise MissingBody
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        # orjson names the reason and the place, nothing of the process.
        raise InvalidInput(f"The body is not valid JSON: {error}. Send a JSON object in UTF-8.") from None
    return check_object(value)


def parse_inner(text: str, loads: Callable[[str], Any] = orjson.loads) -> Any:
    """The value of JSON text that a body, or a model's answer, holds as a string.

    ValueError for what is no JSON, and for what a body may not hold either: many levels, lone surrogates, numbers that
    are not finite.
    """
    try:
        return check_object({"": loads(text)}, depth=INNER_DEPTH_LIMIT)[""]
    except (InvalidInput, RecursionError):
        raise ValueError(f"it is nested deeper than {INNER_DEPTH_LIMIT} levels, or holds what is no text") from None


def check_object(value: Any, *, depth: int = DEPTH_LIMIT) -> dict[str, Any]:
    """``value`` if it is a JSON object that `parse_body` could have made; for inputs that arrive as Python
    objects. Walks it once: whoever reads it afterwards need not."""
    if not isinstance(value, dict):
        raise InvalidInput(f"The body must be a JSON object, not {json_type(value)}.")
    level: list[Any] = [value]
    seen = 0
    for _ in range(depth):
        below: list[Any] = []
        for node in level:
            seen += len(node)
            if seen > VALUE_LIMIT:
                raise InvalidInput(f"The body holds more than {VALUE_LIMIT} values; send less in one request.")
            if isinstance(node, dict):
                for key in node:
                    _check_text(key)
            _check_items(node.values() if isinstance(node, dict) else node, below)
        if not below:
            return value
        level = below
    raise InvalidInput(f"The body is nested deeper than {depth} levels.")


def _check_items(items: Collection[Any], below: list[Any]) -> None:
    """Checks plain values and adds the others to ``below``. Long arrays mostly hold values of one kind, in which
    there is nothing to look for.
    """
    kinds = set(map(type, items))
    if kinds <= _PLAIN or (kinds <= _NUMBERS and all(map(math.isfinite, items))):
        return
    for item in items:
        if isinstance(item, (dict, list)):
            below.append(item)
        elif isinstance(item, str):
            _check_text(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise InvalidInput("Numbers must be finite; NaN and Infinity are not JSON.")


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidInput("The keys of an object must be strings.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput("A string holds a lone surrogate, which is not text; send valid Unicode.") from None


def as_object(body: bytes | dict[str, Any]) -> dict[str, Any]:
    """A body as it came over HTTP, or the object that `parse_body` or `check_object` has made of it already."""
    return parse_body(body) if isinstance(body, (bytes, bytearray)) else body


def json_type(value: Any) -> str:
    """What JSON calls the type of ``value``, with its article, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, (list, tuple)) else "an object"
