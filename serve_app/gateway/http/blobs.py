"""Blobs as answers, whole or a range of their bytes (RFC 9110, section 14)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_app.api.errors import Gone, RangeWrong
from serve_app.state.blobs.files import Files, NoFile

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def span(header: str, size: int) -> tuple[int, int] | None:
    """First byte and the one behind the last that a `Range` header asks for; None: all. Several ranges, and what is no
    range of bytes, count as none. Raises `RangeWrong`.
    """
    found = _RANGE.fullmatch(header.replace(" ", ""))
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found[1], found[2]
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        raise RangeWrong(size)
    return start, end


async def blob_answer(
    request: Request, files: Files, name: str, media_type: str, aside: Callable[..., Any], filename: str = ""
) -> Response:
    """``aside``: calls what blocks off the event loop. Raises `RangeWrong`, and `Gone` for a blob that is not there."""
    try:
        size = await aside(files.size, name)
    except NoFile:
        raise Gone("The file was deleted.") from None
    asked = span(request.headers.get("range", ""), size)
    start, end = asked or (0, size)
    headers = {"Content-Length": str(end - start), "Accept-Ranges": "bytes"}
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    if filename:
        headers["Content-Disposition"] = f'attachment; filename="{filename}"'
    pieces = files.stream(name, start, end)

    async def body() -> AsyncIterator[bytes]:
        while piece := await aside(next, pieces, b""):
            yield piece

    return StreamingResponse(body(), 200 if asked is None else 206, headers, media_type)
