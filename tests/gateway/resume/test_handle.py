"""The Python handle's resumable calls, on two gateways of which one is lost in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from serve_app.binding import AIError, AsyncAI
from serve_app.gateway.http.handle import follow
from tests.gateway.resume.conftest import CHAT, TEXT, Lost, Worker
from tests.waiting import until

STREAM = {"messages": [{"role": "user", "content": "hi"}], "seed": 0}
FOR_A_MINUTE = {"resumable": 60}


class Handle:
    """Serve's handle, in front of gateways of this process: one that is dead is an error of Ray's, for good."""

    def __init__(self, *gateways: Lost) -> None:
        self.gateways = list(gateways)
        self.calls = 0
        self.run, self.run_stream, self.follow = (_Method(call) for call in (self._run, self._frames, self._follow))

    def options(self, stream: bool) -> Handle:
        return self

    async def kill(self) -> None:
        dead = self.gateways.pop(0)
        await dead.kill()

    async def _lives(self, gateway: Lost, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        self.calls += 1
        coming = asyncio.ensure_future(anext(items, None))
        while gateway in self.gateways:
            await asyncio.wait({coming}, timeout=0.01)
            if coming.done():
                if coming.result() is None:
                    return
                yield coming.result()
                coming = asyncio.ensure_future(anext(items, None))
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        raise RayActorError

    def _follow(self, *asked: Any) -> AsyncIterator[Any]:
        return self._lives(self.gateways[0], follow(self.gateways[0], *asked))

    def _frames(self, *asked: Any) -> AsyncIterator[Any]:
        return self._lives(self.gateways[0], self.gateways[0].stream_handle(*asked))

    async def _run(self, *asked: Any) -> Any:
        gateway = self.gateways[0]

        async def once() -> AsyncIterator[Any]:
            yield await gateway.run_handle(*asked)

        async for answer in self._lives(gateway, once()):
            return answer


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


def bound(handle: Handle) -> AsyncAI:
    ai = AsyncAI.__new__(AsyncAI)
    ai._handle = handle
    return ai


def shown(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what pads them."""
    return [{name: value for name, value in frame.items() if name != "p"} for frame in frames]


async def test_a_stream_goes_on_at_another_gateway_event_by_event(start):
    worker = Worker()
    calm = await start(worker)
    alone = bound(Handle(calm))
    plain = [frame async for frame in alone.stream(CHAT, STREAM)]
    whole = [frame async for frame in alone.stream(CHAT, STREAM, FOR_A_MINUTE)]
    assert "".join(frame["response"] for frame in whole) == TEXT and shown(whole) == shown(plain)
    await calm.silence()
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    handle, found = Handle(one, other), []

    async def read() -> None:
        async for frame in bound(handle).stream(CHAT, STREAM, FOR_A_MINUTE):
            found.append(frame)

    reading = asyncio.ensure_future(read())
    await worker.holds(1, one)
    await handle.kill()
    worker.on.set()
    await asyncio.wait_for(reading, 60)
    assert shown(found) == shown(whole) and handle.calls == 2
    assert not one.settled and [settled.status for settled in other.settled] == ["done"]


async def test_a_gateway_that_is_lost_before_it_began_is_as_if_it_had_not_been_asked(start):
    worker = Worker(let=0)
    one, other = await start(worker), await start(worker)
    handle = Handle(one, other)
    whole = asyncio.ensure_future(bound(handle).run(CHAT, STREAM, FOR_A_MINUTE))
    await until(lambda: worker.held)
    await handle.kill()
    worker.on.set()
    assert (await asyncio.wait_for(whole, 60))["response"] == TEXT
    assert len(one.settled) == 0 or one.settled[0].status == "left"
    assert [settled.status for settled in other.settled] == ["done"]


async def test_what_did_not_ask_for_it_is_lost_with_its_gateway(start):
    worker = Worker(let=9)
    handle = Handle(await start(worker))

    async def stream() -> list:
        return [frame async for frame in bound(handle).stream(CHAT, STREAM)]

    for call in (bound(handle).run(CHAT, STREAM), stream()):
        asking = asyncio.ensure_future(call)
        held = worker.held
        await until(lambda before=held: worker.held != before)
        lost, handle.gateways = handle.gateways, []
        with pytest.raises(RayActorError):
            await asyncio.wait_for(asking, 60)
        handle.gateways = lost


async def test_errors_come_with_their_status(start):
    ai = bound(Handle(await start(Worker())))
    for asked in ({"messages": 5}, {**STREAM, "options": {"resumable": -1}}):
        with pytest.raises(AIError) as told:
            async for _ in ai.stream(CHAT, asked, None if "options" in asked else FOR_A_MINUTE):
                pass
        assert told.value.status == 400
