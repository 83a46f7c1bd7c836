"""Server-sent events: framing, padding, keep-alive comments (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import AsyncIterator, Callable
from random import randrange
from typing import Any

import orjson

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
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


async def with_keep_alive(
    frames: AsyncIterator[bytes], interval: float = KEEP_ALIVE_SECONDS, say: Callable[[], bytes] = lambda: KEEP_ALIVE
) -> AsyncIterator[bytes]:
    """``frames``, with a comment, which ``say`` gives, wherever none came for ``interval`` seconds. Closing this closes
    ``frames``.
    """
    task: asyncio.Task[bytes | None] | None = None

    async def take() -> bytes | None:
        return await anext(frames, None)

    try:
        while True:
            # The waiting task survives the comments: cancelling it would end the generator behind it.
            task = task or asyncio.create_task(take())
            done, _ = await asyncio.wait((task,), timeout=interval)
            if not done:
                yield say()
                continue
            item = task.result()
            task = None
            if item is None:
                return
            yield item
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if hasattr(frames, "aclose"):
            await frames.aclose()
