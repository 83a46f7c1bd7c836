"""Pictures in messages and bodies, as their dialects have them: OpenAI's ``image_url`` and ``input_image``, Anthropic's
``image`` blocks, and Workers AI's ``image``.

All become ``{"type": "image", "source": {"data": base64, "media_type": str}}``. Whether that is a picture is found out
by who decodes it.
"""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.files import inlined
from serve_app.api.fields.values import refuse

_UNTOLD = "image/png"
_WANTED = "a data URL (data:image/png;base64,...)"


def picture_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """A content part of any dialect. Raises `InvalidInput`."""
    source = part.get("source")
    if isinstance(source, dict):
        return _block(source, f"{where}.source")
    name = "image_url" if part.get("image_url") is not None else "image"
    value = part.get(name)
    if value is None:
        told = f"{where}: files that were uploaded are not read here; send {_WANTED} as image_url."
        raise InvalidInput(told, param=f"{where}.file_id") if part.get("file_id") else refuse(
            f"{where}.image_url", _WANTED, None
        )  # fmt: skip
    if isinstance(value, dict) and name == "image_url":
        name, value = f"{name}.url", value.get("url")
    return picture_of(value, f"{where}.{name}")


def picture_of(value: Any, name: str, media_type: str = _UNTOLD) -> dict[str, Any]:
    """The part of a data URL, base64 text or an array of bytes. Raises `InvalidInput`."""
    data, told = inlined(value, name, _WANTED, "pictures")
    return {"type": "image", "source": {"data": data, "media_type": told or media_type}}


def _block(source: dict[str, Any], where: str) -> dict[str, Any]:
    kind = source.get("type", "base64")
    if kind == "url":
        return picture_of(source.get("url"), f"{where}.url")
    if kind != "base64":
        raise InvalidInput(f'{where}.type must be "base64"; other sources are not read here.', param=f"{where}.type")
    told = source.get("media_type")
    return picture_of(source.get("data"), f"{where}.data", told if isinstance(told, str) and told else _UNTOLD)


def data_url(part: dict[str, Any]) -> str:
    """The picture of a part, as it is shown again."""
    return f"data:{part['source']['media_type']};base64,{part['source']['data']}"


def picture_schema() -> dict[str, Any]:
    """OpenAI's part, in JSON Schema."""
    url = {"type": "string", "description": "A data URL; others are not fetched."}
    image = {"type": "object", "properties": {"url": url}, "required": ["url"]}
    return {
        "type": "object",
        "properties": {"type": {"const": "image_url"}, "image_url": image},
        "required": ["type", "image_url"],
    }
