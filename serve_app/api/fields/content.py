"""What a message holds: text, or parts of text, images, audio and files. Parts stay apart until a model's own template
or processor takes them.

A part is ``{"type": "text", "text": str}`` or, of another kind, ``{"type": kind, "source": {...}}``: pictures as
`pictures` has them, sounds as `sounds`, others with the fields that their dialect has for them.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.body import json_type
from serve_app.api.fields.pictures import picture_part
from serve_app.api.fields.sounds import sound_part
from serve_app.api.fields.values import objects, refuse, text

PartKind = Literal["text", "image", "audio", "file"]
# What a model reads by an encoder beside its text.
Medium = Literal["image", "audio"]
Content = str | list[dict[str, Any]]

TEXT_ONLY: frozenset[PartKind] = frozenset({"text"})
SEES: frozenset[PartKind] = frozenset({"text", "image"})
HEARS: frozenset[PartKind] = frozenset({"text", "audio"})
ANY_KIND: frozenset[PartKind] = frozenset(get_args(PartKind))
MEDIA: frozenset[str] = frozenset(get_args(Medium))
MAX_PARTS = 1024
# OpenAI's names in chats and responses; Anthropic's are the kinds themselves, and `document`.
_KINDS: dict[str, PartKind] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "file": "file",
    "input_file": "file",
    "document": "file",
}


def parse_content(value: Any, where: str, takes: frozenset[PartKind] = TEXT_ONLY) -> Content:
    """A string, or an array of parts of the kinds that the model ``takes``. Raises `InvalidInput`."""
    if not isinstance(value, list):
        if not isinstance(value, str):
            raise refuse(where, "a string or an array of content parts", value)
        return text(value, where)
    return [_part(part, f"{where}[{i}]", takes) for i, part in enumerate(objects(value, where, limit=MAX_PARTS))]


def _part(part: dict[str, Any], where: str, takes: frozenset[PartKind]) -> dict[str, Any]:
    named = part.get("type", "text")
    if named == "refusal":
        return text_part(text(part.get("refusal"), f"{where}.refusal"))
    kind = part_kind(named)
    if kind is None or kind not in takes:
        shown = f'"{named[:32]}"' if isinstance(named, str) else json_type(named)
        message = f"{where}: content parts of type {shown} are not supported; send text parts."
        raise InvalidInput(message, param=f"{where}.type")
    if kind == "image":
        return picture_part(part, where)
    if kind == "audio":
        return sound_part(part, where)
    return text_part(text(part.get("text"), f"{where}.text")) if kind == "text" else media_part(kind, part)


def part_kind(named: Any) -> PartKind | None:
    """The kind of a part that a dialect calls ``named``; None for one that nobody knows."""
    return _KINDS.get(named) if isinstance(named, str) else None


def text_part(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def media_part(kind: PartKind, part: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "source": {name: value for name, value in part.items() if name != "type"}}


def content_text(content: Content | None) -> str:
    """The text of a message, for templates that know nothing else. ValueError if it holds a part of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if others := sorted({part["type"] for part in content} - TEXT_ONLY):
        raise ValueError(f"a part of kind {others[0]} has no text; a model that takes such parts reads them itself")
    return "\n".join(part["text"] for part in content)
