"""Server-sent events: framing, padding, comments (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import secrets
import string
from random import randrange
from typing import Any

import orjson

MEDIA_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {
    "Content-Type": MEDIA_TYPE,
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0
_PAD_TO = 32
_FILLER = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(4096))


def frame(value: Any) -> bytes:
    """One event whose data is ``value`` as JSON (which has no line breaks)."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """:func:`frame` with the event's name, which the Anthropic and Responses clients dispatch on."""
    return b"event: " + name.encode() + b"\n" + frame(value)


def padding(text: str) -> str:
    """Filler that brings the JSON of ``text`` to a multiple of 32 bytes, so that frame sizes don't tell token
    lengths."""
    size = len(orjson.dumps(text))
    # Only its length matters; drawing each character would be a quarter of what a token costs the gateway.
    start = randrange(len(_FILLER) - _PAD_TO)
    return _FILLER[start : start + -size % _PAD_TO]


def comment(text: str) -> bytes:
    """What clients skip; ``text`` has no line breaks."""
    return b": " + text.encode() + b"\n\n"
