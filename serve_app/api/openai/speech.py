"""OpenAI's speech: what is read of a body, and sound as events."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from serve_app.api.fields.asked import parse_asked
from serve_app.api.fields.ranges import SEED
from serve_app.api.fields.values import choice, string
from serve_app.api.speech import MEDIA_TYPES, SPEED, SpeakRequest, check_text, parse_voice

STREAM_FORMATS = ("audio", "sse")


@dataclass(slots=True, frozen=True)
class ParsedSpeech:
    """``events``: whether the sound comes as server-sent events."""

    request: SpeakRequest
    events: bool = False


def parse_speech(body: dict[str, Any]) -> ParsedSpeech:
    """``instructions`` are not used: no model here follows any. Raises `InvalidInput`."""
    asked = parse_asked(body)
    text = check_text(string(body, "input"), "input")
    request = SpeakRequest(
        text,
        parse_voice(body.get("voice"), "voice"),
        SPEED.read(body, "speed") or 1.0,
        SEED.read(body, "seed") or 0,
        choice(body, "response_format", tuple(MEDIA_TYPES)) or "mp3",  # type: ignore[arg-type]
        whole=False,
        stream=True,
        **asked,
    )
    return ParsedSpeech(request, choice(body, "stream_format", STREAM_FORMATS) == "sse")


async def events(pieces: AsyncIterator[bytes], characters: int) -> AsyncIterator[bytes]:
    """The sound as server-sent events, and one for its end."""
    async for piece in pieces:
        yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "characters": characters}
    yield _event({"type": "speech.audio.done", "usage": usage})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
