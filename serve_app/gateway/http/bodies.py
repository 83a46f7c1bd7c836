"""A request's body off the wire, read once and within bounds; large ones are parsed beside the event loop, in turns."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from serve_app.api.errors import BodyTooLarge, InvalidInput, MissingBody, UnknownEncoding
from serve_app.api.fields.body import parse_body, read_bounded
from serve_app.api.multipart import read_multipart
from serve_app.gateway.http.in_turns import InTurns
from serve_app.tasks.task import Body, BodyKind

# Looking through less takes about a millisecond.
INLINE_BYTES = 64 << 10
# What Content-Encoding may be.
GZIP = frozenset({"gzip", "x-gzip"})


_Found = TypeVar("_Found")


async def read_body(
    request: Request, limit: int, large: InTurns, kinds: Collection[BodyKind] = frozenset({"json"})
) -> Body:
    """The body as one of ``kinds``, by its label; where only JSON is taken, labels do not count. That of a request from
    inside is here already. ``large``: what looks through large ones. Raises `ApiError`.
    """
    account = getattr(request.state, "account", "")
    raw: bytes | None = getattr(request.state, "whole_body", None)
    if raw is None:
        raw = await read_bounded(request.stream(), request.headers.get("content-length"), limit=limit)
    elif len(raw) > limit:
        raise BodyTooLarge(limit)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        if encoding not in GZIP:
            raise UnknownEncoding(encoding)
        raw = await large.run(account, unzipped, raw, limit)
    request.state.raw_body = raw

    async def look(through: Callable[..., _Found], raw: bytes, *more: str) -> _Found:
        return await large.run(account, through, raw, *more) if len(raw) > INLINE_BYTES else through(raw, *more)

    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if "multipart" in kinds and media_type == "multipart/form-data":
        return Body(media_type=media_type, parts=await look(read_multipart, raw, content_type))
    if "bytes" in kinds and (media_type != "application/json" or "json" not in kinds):
        if not raw:
            raise MissingBody
        return Body(data=raw, media_type=media_type)
    return Body(json=await look(partial(parse_body, limit=limit), raw), media_type=media_type)


def unzipped(raw: bytes, limit: int) -> bytes:
    """What gzip has packed into ``raw``, at most ``limit`` bytes: more are never unpacked, however little they took.
    Raises `BodyTooLarge`, and `InvalidInput` for what is no single, whole gzip file."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        body = unpacker.decompress(raw, limit + 1)
    except zlib.error:
        raise InvalidInput("The body is not gzip, which its Content-Encoding says it is.") from None
    if len(body) > limit:
        raise BodyTooLarge(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidInput("The body is not one whole gzip file.")
    return body
