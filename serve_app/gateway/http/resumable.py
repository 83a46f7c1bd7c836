"""Streams that can be resumed, between HTTP and :mod:`serve_app.gateway.resume`: begun by a request, and run again from
what was kept of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app.api import identity
from serve_app.api.openai.write import close
from serve_app.api.types import Event
from serve_app.gateway.http import request_id
from serve_app.gateway.http.inside import Inside
from serve_app.gateway.http.streams import EventStream, Primed, progressing
from serve_app.gateway.resume.log import StreamLog, current
from serve_app.gateway.resume.streams import Streams
from serve_app.state.callers.accounts import Caller, Priority, Scope, sorted_scopes
from serve_app.state.kept.streams import Head, Taken

Frames = Callable[[AsyncIterator[Event]], AsyncIterator[bytes]]
# What says who asks, or how the body came.
_DROPPED = frozenset(
    b"authorization cf-aig-authorization x-api-key x-auth-key cookie host content-length content-encoding".split()
)


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """A request as it is run again."""

    # What stands before the routes, where the application does not have the whole address.
    root_path: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    weight: float
    priority: Priority
    # Streams of versions before there were scopes have neither.
    key: str = ""
    scopes: tuple[Scope, ...] = ("inference", "read")
    # See `identity.Identity.kept`.
    looked_up: dict[str, str] = {}


async def resumable(
    streams: Streams,
    request: Request,
    events: AsyncIterator[Event],
    frames: Frames,
    waiting: Callable[[], str],
    keep_s: float,
) -> Response:
    """The answer that streams ``frames`` of ``events``, which go on for ``keep_s`` seconds without its client; an error
    before the first event becomes an HTTP status.
    """
    keep_s = min(keep_s, streams.keep_max_s)
    wait = waiting()
    stream_id = await launch(streams, request, events, frames, keep_s, first=not wait)
    reading = await streams.frames(request.state.account, stream_id, 0)
    return progressing(reading, reading, waiting) if wait else EventStream(reading, reading)


async def launch(
    streams: Streams,
    request: Request,
    events: AsyncIterator[Event],
    frames: Frames,
    keep_s: float | None,
    *,
    first: bool = False,
) -> str:
    """Begins a stream that nobody needs to read, or goes on with the one at hand; its id. ``first``: not before the
    first event is there. ``keep_s`` None: it goes on to its end in any case.
    """
    again = current.get()
    stream = again
    try:
        stream = again or _begin(streams, request, keep_s)
        before = current.set(stream)
        try:
            ordered = stream.ordered(events)
            await streams.run(stream, frames(await Primed.of(ordered) if first and again is None else ordered))
        finally:
            current.reset(before)
    except BaseException:
        if again is None:
            await close(events)
            if stream is not None:
                stream.settle()
        raise
    request.state.stream_id = stream.id
    return stream.id


def _begin(streams: Streams, request: Request, keep_s: float | None) -> StreamLog:
    known, caller = identity.current.get(), request.state.caller
    assert known is not None
    streams.check_room(caller.account)
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _DROPPED]
    kept = _Kept(
        request.scope.get("root_path", ""),
        request.scope["path"],
        request.scope.get("query_string", b""),
        headers,
        request.state.raw_body,
        caller.weight,
        caller.priority,
        caller.key,
        tuple(sorted_scopes(caller.scopes)),
        known.kept,
    )
    return StreamLog(Head(known.id, caller.account, known.created, keep_s, msgspec.msgpack.encode(kept)))


def runs_again(
    routes: Sequence[Route], handlers: Sequence[Callable[[Request], Awaitable[Response]]]
) -> Callable[[Taken, StreamLog], Awaitable[None]]:
    """What runs a stream's request again, up to :meth:`Streams.run`. ``handlers``: of the ``routes``, unguarded."""

    inside = Inside(zip(routes, handlers, strict=True))

    async def again(taken: Taken, stream: StreamLog) -> None:
        head = taken.head
        kept = msgspec.msgpack.decode(head.request, type=_Kept)
        caller = Caller(head.account, kept.weight, kept.priority, kept.key, frozenset(kept.scopes))
        request, handler = inside.post(
            kept.path, kept.body, caller, headers=kept.headers, query=kept.query, root_path=kept.root_path
        )
        request_id.current.set(head.id)
        identity.current.set(identity.Identity(head.id, head.created, again=True, kept=dict(kept.looked_up)))
        current.set(stream)
        await handler(request)

    return again
