"""Large bodies, from the network straight to where they are kept: at no time more than a piece is in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from serve_app.api.errors import BodyTooLarge, Timeout, UnknownEncoding

PIECE = 256 << 10
# A client that sends nothing for so long has gone.
IDLE_S = 60.0
_Found = TypeVar("_Found")


@dataclass(slots=True, frozen=True)
class Begun:
    """``data``: what has come of a body, and the rest of it; ``whole``: there is none."""

    data: bytes
    stream: AsyncIterator[bytes]
    whole: bool


async def pour(
    request: Request,
    take: Callable[[Iterator[bytes]], _Found],
    limit: int,
    pool: ThreadPoolExecutor,
    begun: Begun | None = None,
) -> _Found:
    """What ``take`` makes of the body's pieces, which it gets on a thread of ``pool``. ``begun``: what has been read of
    the body. Raises `BodyTooLarge` for more than ``limit`` bytes, and `Timeout`, in ``take`` first.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnknownEncoding(encoding)
    declared = request.headers.get("content-length", "").strip()
    if declared.isdigit() and int(declared[:20]) > limit:
        raise BodyTooLarge(limit)
    loop = asyncio.get_running_loop()
    stream = request.stream() if begun is None else begun.stream

    def pieces() -> Iterator[bytes]:
        size = 0
        if begun is not None and begun.data:
            size = len(begun.data)
            yield begun.data
        while piece := asyncio.run_coroutine_threadsafe(_next(stream), loop).result():
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(limit)
            yield piece

    return await loop.run_in_executor(pool, take, pieces())


async def begin(request: Request, limit: int) -> Begun:
    """The first ``limit`` bytes of a body, or a little more. Raises `Timeout`."""
    parts: list[bytes] = []
    size, stream = 0, request.stream()
    while size <= limit and (piece := await _next(stream)):
        parts.append(piece)
        size += len(piece)
    return Begun(b"".join(parts), stream, size <= limit)


async def _next(stream: AsyncIterator[bytes]) -> bytes:
    """The next quarter of a megabyte, less at the end, b"" behind it."""
    parts: list[bytes] = []
    size = 0
    try:
        while size < PIECE:
            async with asyncio.timeout(IDLE_S):
                piece = await anext(stream, None)
            if piece is None:
                break
            parts.append(piece)
            size += len(piece)
    except TimeoutError:
        raise Timeout(f"Nothing of the body came for {IDLE_S:g} seconds.") from None
    return b"".join(parts)
