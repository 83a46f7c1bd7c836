"""Sounds in messages and bodies, as their dialects have them: OpenAI's ``input_audio``, in Responses as well, vLLM's
``audio_url``, and ``audio`` beside a native prompt.

All become ``{"type": "audio", "source": {"data": base64, "format": str}}``. What the format is in truth is found out by
who decodes it.
"""

from __future__ import annotations

from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.fields.files import inlined
from serve_app.api.fields.values import refuse, string

_WANTED = "base64 or a data URL (data:audio/wav;base64,...)"
_UNTOLD = "wav"


def sound_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """A content part of any dialect. Raises `InvalidInput`."""
    names = ("input_audio", "audio_url", "audio")
    name = next((name for name in names if part.get(name) is not None), None)
    if name is None:
        told = f"{where}: files that were uploaded are not read here; send {_WANTED} as input_audio.data."
        raise InvalidInput(told, param=f"{where}.file_id") if part.get("file_id") else refuse(
            f"{where}.input_audio", "an object with data and format", None
        )  # fmt: skip
    value, form = part[name], None
    if isinstance(value, dict):
        form = string(value, "format")
        inner = "url" if name == "audio_url" else "data"
        name, value = f"{name}.{inner}", value.get(inner)
    return sound_of(value, f"{where}.{name}", form)


def sound_of(value: Any, name: str, form: str | None = None) -> dict[str, Any]:
    """The part of a data URL, base64 text or an array of bytes. Raises `InvalidInput`."""
    data, told = inlined(value, name, _WANTED, "sounds")
    return {"type": "audio", "source": {"data": data, "format": form or told.rpartition("/")[2] or _UNTOLD}}


def sound_schema() -> dict[str, Any]:
    """OpenAI's part, in JSON Schema."""
    data = {"type": "string", "description": "Base64 of the file, or a data URL.", "contentEncoding": "base64"}
    form = {"type": "string", "description": "wav, mp3, flac, ogg and others; found out by the file itself."}
    sound = {"type": "object", "properties": {"data": data, "format": form}, "required": ["data"]}
    return {
        "type": "object",
        "properties": {"type": {"const": "input_audio"}, "input_audio": sound},
        "required": ["type", "input_audio"],
    }
