"""Answers of events: bodies that close the request behind them however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from serve_app.api import sse
from serve_app.api.openai_answers import close
from serve_app.api.types import Event

# A client that takes nothing for this long has lost interest, or holds a slot of the engine on purpose.
SLOW_CLIENT_S = 60.0


async def streamed(
    events: AsyncIterator[Event], frames: Callable[[AsyncIterator[Event]], AsyncIterator[bytes]]
) -> EventStream:
    """The answer that streams ``frames`` of ``events``; an error before the first event becomes an HTTP status."""
    primed = await Primed.of(events)
    return EventStream(frames(primed), primed)


class Primed:
    """Events whose first one is there already, so that what goes wrong before it still becomes an HTTP status.

    A class and not a generator: closing a generator that was never started would leave ``events`` open, and with them
    the request in the engine, when a client leaves just before the first byte.
    """

    def __init__(self, first: Event | None, events: AsyncIterator[Event]) -> None:
        self._first = first
        self._events = events

    @classmethod
    async def of(cls, events: AsyncIterator[Event]) -> Primed:
        return cls(await anext(events, None), events)

    def __aiter__(self) -> Primed:
        return self

    async def __anext__(self) -> Event:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._events)

    async def aclose(self) -> None:
        await close(self._events)


class EventStream(StreamingResponse):
    """Server-sent events that close the request behind them however they end, also before the first byte."""

    def __init__(self, frames: AsyncIterator[bytes], events: Primed, patience_s: float = SLOW_CLIENT_S) -> None:
        super().__init__(sse.with_keep_alive(frames), headers=dict(sse.HEADERS))
        self._events = events
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def impatient(message: Message) -> None:
            async with asyncio.timeout(self._patience_s):
                await send(message)

        try:
            await super().__call__(scope, receive, impatient)
        finally:
            await self._events.aclose()
