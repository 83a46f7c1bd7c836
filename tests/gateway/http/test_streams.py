"""Answers that are streams: comments in silence, clients that take nothing, models that have to start first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from serve_app.api import sse
from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import Event, TextDelta
from serve_app.gateway.http import streams
from serve_app.gateway.http.streams import EventStream, Primed, streamed


class Client:
    """The other side of an ASGI application. ``blocked``: it takes nothing more."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.headers: list[Any] = []
        self.blocked = False
        self.changed = asyncio.Event()
        self.complete = False
        self._left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.blocked:
            await asyncio.Event().wait()
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            self.headers = message["headers"]
        else:
            self.parts += [message["body"]] if message["body"] else []
            self.complete = self.complete or not message["more_body"]
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def leave(self) -> None:
        self._left.set()

    def read(self, answer: EventStream) -> asyncio.Task[None]:
        return asyncio.ensure_future(answer({"type": "http", "asgi": {}}, self.receive, self.send))


class Source:
    """Events that come when told to; ``closed`` once they are not wanted any more."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Event]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield TextDelta(0, item)
        finally:
            self.closed.set()


async def frames(primed: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    try:
        async for event in primed:
            assert isinstance(event, TextDelta)
            yield event.text.encode()
    except OutOfCapacity:
        yield b"refused"


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def client():
    return Client()


async def test_events_come_in_order_and_then_the_end(source, client):
    for item in ("one", "two", None):
        source.queue.put_nowait(item)
    await client.read(await streamed(source.events(), frames))
    assert client.parts == [b"one", b"two"] and client.complete and source.closed.is_set()
    assert (b"content-type", b"text/event-stream; charset=utf-8") in client.headers


async def test_comments_fill_silence_and_who_leaves_ends_the_request(source, client):
    source.queue.put_nowait("one")
    primed = await Primed.of(source.events())
    reading = client.read(EventStream(frames(primed), primed, every_s=0.01))
    await client.until(lambda: client.parts[:3] == [b"one", sse.KEEP_ALIVE, sse.KEEP_ALIVE])
    source.queue.put_nowait("two")
    await client.until(lambda: b"two" in client.parts)
    client.leave()
    await reading
    assert source.closed.is_set() and not client.complete


@pytest.mark.parametrize("when", ["at once", "after an event", "in silence"])
async def test_a_client_that_takes_nothing_loses_its_stream(source, client, when):
    source.queue.put_nowait("one")
    primed = await Primed.of(source.events())
    every_s = 0.02 if when == "in silence" else 100.0
    client.blocked = when == "at once"
    reading = client.read(EventStream(frames(primed), primed, patience_s=0.01, every_s=every_s))
    if not client.blocked:
        await client.until(lambda: bool(client.parts))
        client.blocked = True
    if when == "after an event":
        source.queue.put_nowait("two")
    with pytest.raises(BaseException) as ended:  # a group where Starlette uses one
        await reading
    assert "TimeoutError" in repr(ended.value) and source.closed.is_set()


async def test_a_stream_that_waits_for_a_model_says_so(source, client, monkeypatch):
    monkeypatch.setattr(streams, "PROGRESS_S", 0.05)
    left = ["a model is starting, about 3 s left"]
    reading = client.read(await streamed(source.events(), frames, lambda: left[0]))
    await client.until(lambda: client.parts == [b": a model is starting, about 3 s left\n\n"])
    left[0] = ""
    await client.until(lambda: sse.KEEP_ALIVE in client.parts)
    client.parts.clear()
    for item in ("x", OutOfCapacity()):
        source.queue.put_nowait(item)
    await reading
    assert [p for p in client.parts if p != sse.KEEP_ALIVE] == [b"x", b"refused"] and client.complete


async def test_who_is_refused_while_a_model_starts_gets_a_status(source, monkeypatch):
    monkeypatch.setattr(streams, "PROGRESS_S", 10.0)
    source.queue.put_nowait(OutOfCapacity(retry_after=7.0))
    with pytest.raises(OutOfCapacity):
        await streamed(source.events(), frames, lambda: "waiting")
    assert source.closed.is_set()


async def test_who_leaves_while_a_model_starts_is_forgotten(source, client, monkeypatch):
    monkeypatch.setattr(streams, "PROGRESS_S", 0.02)
    reading = client.read(await streamed(source.events(), frames, lambda: "waiting"))
    await client.until(lambda: bool(client.parts))
    client.leave()
    await reading
    assert source.closed.is_set()
