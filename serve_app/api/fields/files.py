"""Files in native bodies: the body itself, an array of numbers, or base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.values import refuse

_EXPECTED = "an array of bytes (0 to 255) or base64"


def read_file(data: bytes, body: dict[str, Any], name: str) -> bytes:
    """The file in ``data``, a body that is one, or in the field ``name`` of a JSON ``body``. Raises `InvalidInput`."""
    if data:
        return data
    value = body.get(name)
    if value is None:
        message = f"Input does not match the model's schema: required: {name} ({_EXPECTED}), or the file as the body."
        raise InvalidInput(message, param=name)
    if isinstance(value, dict):
        # What bindings send for a stream: its body, with a content type beside it.
        value = value.get("body")
    found = decoded(value, name)
    if not found:
        raise InvalidInput(f"{name} must not be empty.", param=name)
    return found


def decoded(value: Any, name: str) -> bytes:
    """The bytes of an array of numbers, base64 or a data URL. Raises `InvalidInput`."""
    if isinstance(value, list):
        try:
            return bytes(value)
        except (TypeError, ValueError):
            raise InvalidInput(f"{name} must hold whole numbers from 0 to 255.", param=name) from None
    if not isinstance(value, str):
        raise refuse(name, _EXPECTED, value)
    head, comma, rest = value[:256].partition(",")
    if head.startswith("data:"):
        if not comma or not head.endswith(";base64"):
            raise InvalidInput(f"{name} must be a data URL with ;base64 before its comma.", param=name)
        value = value[len(head) + 1 :]
    try:
        # Line breaks belong to base64 as mail has it. Not split(), which makes millions of texts of a hostile one.
        return base64.b64decode(value.encode("ascii").translate(None, b" \t\n\v\f\r"), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(f"{name} must be base64; a URL is not fetched.", param=name) from None


def inlined(value: Any, name: str, wanted: str, plural: str) -> tuple[str, str]:
    """The base64 and the media type ("": none is told) of a data URL, base64 text or an array of bytes, where it is
    said that ``plural`` are sent as ``wanted``. Raises `InvalidInput`."""
    if isinstance(value, list):
        return base64.b64encode(decoded(value, name)).decode(), ""
    if not isinstance(value, str) or not value:
        raise refuse(name, wanted, value)
    if value[:8].lower().startswith(("http:", "https:")):
        raise InvalidInput(f"{name}: {plural} are not fetched; send the file itself as {wanted}.", param=name)
    head, comma, _ = value[:256].partition(",")
    if not head.startswith("data:"):
        return value, ""
    if not comma or not head.endswith(";base64"):
        raise InvalidInput(f"{name} must be {wanted}, with ;base64 before its comma.", param=name)
    return value[len(head) + 1 :], head[5 : -len(";base64")].partition(";")[0]


def part_file(part: dict[str, Any], where: str) -> bytes:
    """The file in a content part that is a picture or sound. Raises `InvalidInput`."""
    found = decoded(part["source"]["data"], where)
    if not found:
        raise InvalidInput(f"{where}: the file is empty.", param=where)
    return found


def file_schema(description: str) -> dict[str, Any]:
    """The field, in JSON Schema."""
    numbers = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 255}}
    text = {"type": "string", "minLength": 1, "contentEncoding": "base64"}
    return {"description": description, "oneOf": [numbers, text]}
