"""`Idempotency-Key`: a request that is sent again under its key is answered with the answer that there was."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from serve_app.api.errors import InvalidInput, KeyInUse, KeyReused
from serve_app.api.fields.body import read_bounded
from serve_app.gateway.booking import kept_with_answer
from serve_app.gateway.http.streams import EventStream
from serve_app.state.kept.streams import KeyClaim
from serve_app.state.spending.ledger import Entry

if TYPE_CHECKING:
    from serve_app.gateway.core import Gateway

log = logging.getLogger("ray.serve")

HEADER = "idempotency-key"
MAX_KEY = 255
# Larger answers are not kept: the key is free again.
MAX_ANSWER_BYTES = 4 << 20
Handler = Callable[[Request], Awaitable[Response]]


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """An answer, or the id of the resumable stream that it is."""

    body: bytes
    media_type: str
    stream_id: str = ""


async def once(gateway: Gateway, request: Request, handler: Handler) -> Response:
    """``handler``'s answer, or where the request's key was used before the one that there was. Raises
    `KeyReused` if that was another request, and `KeyInUse` while its answer is not there.
    """
    key, account = check_key(request), request.state.account
    assert key is not None
    settings = gateway.settings
    limit = max(settings.max_body_bytes, settings.max_embedding_body_bytes, settings.max_media_body_bytes)
    raw = await read_bounded(request.stream(), request.headers.get("content-length"), limit=limit)
    asked = b"\0".join([request.method.encode(), request.url.path.encode(), request.url.query.encode(), raw])
    printed = hashlib.sha256(asked).hexdigest()
    with gateway.streams.living():
        known = await gateway.keys.claim(account, key, printed)
        if isinstance(known, KeyClaim):
            return await _first(gateway, request, raw, known, handler)
    if known.print != printed:
        raise KeyReused
    if known.answer is None:
        raise KeyInUse
    kept = msgspec.msgpack.decode(known.answer, type=_Kept)
    if kept.stream_id:
        reading = await gateway.streams.frames(account, kept.stream_id, 0)
        response: Response = EventStream(reading, reading)
    else:
        response = Response(kept.body, media_type=kept.media_type)
    response.headers["Idempotent-Replayed"] = "true"
    return response


def check_key(request: Request) -> str | None:
    """The request's key; None: it has none. Raises `InvalidInput`."""
    if HEADER not in request.headers:
        return None
    key = request.headers[HEADER].strip()
    if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise InvalidInput(f"Idempotency-Key must have 1 to {MAX_KEY} printable ASCII characters.")
    return key


async def _first(gateway: Gateway, request: Request, raw: bytes, claim: KeyClaim, handler: Handler) -> Response:
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            return await request.receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    kept = None
    entries: list[Entry] = []
    before = kept_with_answer.set(entries)
    try:
        response = await handler(Request(request.scope, receive))
        kept = _kept(request, response)
        return response
    finally:
        kept_with_answer.reset(before)
        # Also where the client leaves meanwhile.
        await asyncio.shield(_settle(gateway, claim, kept, entries))


def _kept(request: Request, response: Response) -> _Kept | None:
    if response.status_code != 200:
        return None
    if isinstance(response, StreamingResponse):
        stream_id = getattr(request.state, "stream_id", "")
        return _Kept(b"", "", stream_id) if stream_id else None
    body = bytes(response.body)
    return _Kept(body, response.media_type or "application/json") if len(body) <= MAX_ANSWER_BYTES else None


async def _settle(gateway: Gateway, claim: KeyClaim, kept: _Kept | None, entries: list[Entry]) -> None:
    """Keeps the answer with what it costs, so that a key is charged once. Raises `BooksClosed`."""
    packed = None if kept is None else msgspec.msgpack.encode(kept)
    try:
        if not await gateway.keys.end(claim, packed, [entry.row() for entry in entries]):
            log.warning("the answer of an Idempotency-Key came after another gateway's and is not charged")
        if packed is not None:
            return
    except Exception as error:
        # The answer itself is right; only that it can be had again is not, or later.
        log.warning("the answer of an Idempotency-Key is not kept: %s", error)
    for entry in entries:
        await gateway.state.ledger.enter(entry)
