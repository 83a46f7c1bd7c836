"""Answers of events: bodies that close the request behind them however they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from serve_app.api import sse
from serve_app.api.openai.write import close
from serve_app.api.types import Event

# A client that takes nothing for this long has lost interest, or holds a slot of the engine on purpose.
SLOW_CLIENT_S = 60.0
# While a model starts, a client that streams is told of it this often.
PROGRESS_S = 1.0


async def streamed(
    events: AsyncIterator[Any],
    frames: Callable[[AsyncIterator[Any]], AsyncIterator[bytes]],
    waiting: Callable[[], str] = lambda: "",
    media_type: str = sse.MEDIA_TYPE,
) -> EventStream:
    """The answer that streams ``frames`` of ``events``; an error before the first event becomes an HTTP status.

    ``waiting()`` says what the first event waits for if that takes long, say that a model has to start. Then the answer
    begins at once, with comments that repeat it, and an error comes in the stream. Streams of another ``media_type``
    have no comments, and say nothing until they have something to say.
    """
    if media_type != sse.MEDIA_TYPE:
        primed = await Primed.of(events)
        return EventStream(frames(primed), primed, say=lambda: b"", media_type=media_type)
    if not waiting():
        primed = await Primed.of(events)
        return EventStream(frames(primed), primed)
    first = asyncio.ensure_future(anext(events, None))
    try:
        # What is refused is refused now, with its HTTP status.
        await asyncio.wait({first}, timeout=PROGRESS_S)
        primed = Primed(await first if first.done() else first, events)
    except BaseException:
        first.cancel()
        await close(events)
        raise

    return progressing(frames(primed), primed, waiting)


def progressing(frames: AsyncIterator[bytes], events: Closing, waiting: Callable[[], str]) -> EventStream:
    """An answer that begins at once and repeats what it waits for."""

    def say() -> bytes:
        text = waiting()
        return sse.comment(text) if text else sse.KEEP_ALIVE

    return EventStream(frames, events, every_s=PROGRESS_S, say=say, opening=say())


class Closing(Protocol):
    async def aclose(self) -> None: ...


class Primed:
    """Events whose first one is there already, so that what goes wrong before it still becomes an HTTP status; or is
    awaited already.

    A class and not a generator: closing a generator that was never started would leave ``events`` open, and with them
    the request in the engine, when a client leaves just before the first byte.
    """

    def __init__(self, first: Event | asyncio.Future[Event | None] | None, events: AsyncIterator[Event]) -> None:
        self._first = first
        self._events = events

    @classmethod
    async def of(cls, events: AsyncIterator[Event]) -> Primed:
        return cls(await anext(events, None), events)

    def __aiter__(self) -> Primed:
        return self

    async def __anext__(self) -> Event:
        if self._first is not None:
            first = await self._first if isinstance(self._first, asyncio.Future) else self._first
            self._first = None
            if first is None:
                raise StopAsyncIteration
            return first
        return await anext(self._events)

    async def aclose(self) -> None:
        if isinstance(self._first, asyncio.Future):
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await close(self._events)


class EventStream(StreamingResponse):
    """Server-sent events that close the request behind them however they end, also before the first byte.

    ``opening`` comes first; where nothing was sent for ``every_s`` seconds, the comment ``say()`` does. One task per
    stream looks after that, and after clients that take nothing: timers for each event would be half of what it costs.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        events: Closing,
        patience_s: float = SLOW_CLIENT_S,
        every_s: float = sse.KEEP_ALIVE_SECONDS,
        say: Callable[[], bytes] = lambda: sse.KEEP_ALIVE,
        opening: bytes = b"",
        media_type: str = sse.MEDIA_TYPE,
    ) -> None:
        super().__init__(frames, headers={**sse.HEADERS, "Content-Type": media_type})
        self._frames = frames
        self._events = events
        self._patience_s = patience_s
        self._every_s = every_s
        self._say = say
        self._opening = opening
        # When something was last given to the client or taken by it.
        self._since = 0.0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if hasattr(self._frames, "aclose"):
                await self._frames.aclose()
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        """What Starlette calls to send everything. Raises `TimeoutError` for a client that takes nothing."""
        self._since = time.monotonic()
        async with asyncio.timeout(None) as limit:
            watching = asyncio.ensure_future(self._watch(send, limit))
            try:
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if self._opening:
                    await self._send(send, {"type": "http.response.body", "body": self._opening, "more_body": True})
                async for frame in self._frames:
                    await self._send(send, {"type": "http.response.body", "body": frame, "more_body": True})
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                watching.cancel()

    async def _send(self, send: Send, message: Message) -> None:
        self._since, self._sending = time.monotonic(), True
        await send(message)
        self._since, self._sending = time.monotonic(), False

    async def _watch(self, send: Send, limit: asyncio.Timeout) -> None:
        while True:
            allowed = self._patience_s if self._sending else self._every_s
            left = self._since + allowed - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, self._patience_s))
            elif self._sending:
                limit.reschedule(asyncio.get_running_loop().time())
                return
            else:
                said = self._say()
                try:
                    async with asyncio.timeout(self._patience_s if said else None):
                        if said:
                            await send({"type": "http.response.body", "body": said, "more_body": True})
                except TimeoutError:
                    limit.reschedule(asyncio.get_running_loop().time())
                    return
                except OSError:  # the client has gone, as whoever sends the events will find
                    return
                self._since = time.monotonic()
