"""OpenAI's Realtime transcription sessions: what a client says of its session, and the events of both sides."""

from __future__ import annotations

import base64
import binascii
import secrets
from dataclasses import dataclass, replace
from typing import Any

from serve_app.api.errors import ApiError, InvalidInput
from serve_app.api.fields.ranges import Range
from serve_app.api.fields.values import string
from serve_app.api.transcripts import Pauses

RATES = (16_000, 24_000)
MAX_PROMPT = 2000
TURNS = Pauses(threshold=0.5, pause_s=0.5, before_s=0.3)
_THRESHOLD = Range(0, 1, whole=False)
_PAUSE_MS = Range(100, 10_000)
_BEFORE_MS = Range(0, 1000)


@dataclass(slots=True, frozen=True)
class Session:
    """``turns``: how the server finds turns; None: the client says when one is over."""

    id: str
    model: str = ""
    language: str | None = None
    prompt: str | None = None
    rate: int = 24_000
    turns: Pauses | None = TURNS

    def shown(self) -> dict[str, Any]:
        detection = None
        if self.turns is not None:
            detection = {
                "type": "server_vad",
                "threshold": self.turns.threshold,
                "prefix_padding_ms": round(self.turns.before_s * 1000),
                "silence_duration_ms": round(self.turns.pause_s * 1000),
            }
        told = {"model": self.model, "language": self.language, "prompt": self.prompt}
        heard = {"format": {"type": "audio/pcm", "rate": self.rate}, "transcription": told, "turn_detection": detection}
        return {
            "id": self.id,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": heard},
        }


def updated(session: Session, given: Any) -> Session:
    """``session`` with what a `session.update` says. Raises `InvalidInput`."""
    given = _object(given, "session")
    if given.get("type", "transcription") != "transcription":
        raise InvalidInput("session.type: only transcription sessions are served.", param="session.type")
    heard = _object(_object(given.get("audio") or {}, "audio").get("input") or {}, "audio.input")
    if (form := heard.get("format")) is not None:
        form = _object(form, "audio.input.format")
        if form.get("type") != "audio/pcm" or form.get("rate", 24_000) not in RATES:
            named = " or ".join(map(str, RATES))
            raise InvalidInput(f"audio.input.format must be audio/pcm with a rate of {named}.", param="format")
        session = replace(session, rate=form.get("rate", 24_000))
    if (told := heard.get("transcription")) is not None:
        told = _object(told, "audio.input.transcription")
        session = replace(
            session,
            model=string(told, "model", limit=512) or session.model,
            language=string(told, "language", limit=32) or None,
            prompt=string(told, "prompt", limit=MAX_PROMPT) or None,
        )
    if "turn_detection" in heard:
        session = replace(session, turns=_turns(heard["turn_detection"]))
    return session


def _turns(given: Any) -> Pauses | None:
    if given is None:
        return None
    given = _object(given, "turn_detection")
    if given.get("type") != "server_vad":
        raise InvalidInput("turn_detection.type must be server_vad.", param="turn_detection")
    threshold, pause, before = (
        allowed.read(given, name)
        for allowed, name in (
            (_THRESHOLD, "threshold"), (_PAUSE_MS, "silence_duration_ms"), (_BEFORE_MS, "prefix_padding_ms"),
        )
    )  # fmt: skip
    return Pauses(
        TURNS.threshold if threshold is None else threshold,
        TURNS.pause_s if pause is None else pause / 1000,
        TURNS.before_s if before is None else before / 1000,
    )


def sound(event: dict[str, Any]) -> bytes:
    """The samples of an `input_audio_buffer.append`. Raises `InvalidInput`."""
    try:
        pcm = base64.b64decode((string(event, "audio") or "").encode(), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("audio must be base64 of 16-bit samples.", param="audio") from None
    if len(pcm) % 2:
        raise InvalidInput("audio must hold whole samples of 16 bits.", param="audio")
    return pcm


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "event_id": f"event_{secrets.token_hex(12)}", **fields}


def transcription(kind: str, item: str, **fields: Any) -> dict[str, Any]:
    return event(f"conversation.item.input_audio_transcription.{kind}", item_id=item, content_index=0, **fields)


def failure(error: ApiError) -> dict[str, Any]:
    """What events tell of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"type": kind, "code": str(error.code), "message": error.message, "param": getattr(error, "param", None)}


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{name} must be an object.", param=name)
    return value
