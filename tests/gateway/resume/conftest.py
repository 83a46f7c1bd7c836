"""Gateways on one store, whose workers are the test's: what they say is given, and comes when it is let through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.resume import streams
from serve_app.gateway.settings import GatewaySettings
from serve_app.sampling_params import TokenLogprobs
from serve_app.state.callers.accounts import hash_key
from serve_app.tasks.work import Settled
from serve_app.wire.generate import GenerateCall, Generated, PromptPath
from serve_app.wire.tokens import TokenItem
from tests.waiting import until

CHAT = "@cf/pico/pico-instruct"
KEY = "a key of this test alone"
TEXT = "One, two and three: the rest is as it was said before, word by word, until the end."


class Worker:
    """Says ``texts[seed // 1000][seed % 1000]``, where choices have one seed after another.

    ``let``: how many tokens of each may go out before :attr:`on` is set, ``step`` of them at a time, as with drafts.
    """

    def __init__(self, texts: list[tuple[str, ...]] | None = None, let: int = 10_000, step: int = 1) -> None:
        self.texts = texts or [(TEXT,) * 16]
        self.let = let
        self.step = step
        self.on = asyncio.Event()
        # Calls that wait for it.
        self.held = 0
        self.calls: list[GenerateCall] = []

    async def holds(self, count: int, *gateways: Lost) -> None:
        """Until so many calls wait, and the store has all that came before."""
        async with asyncio.timeout(60):
            while self.held < count or any(
                one.safe < len(one.frames) for gateway in gateways for one in gateway.streams._running.values()
            ):
                await asyncio.sleep(0.005)


class Lost(Gateway):
    """A gateway that the test can end like a process that is killed."""

    http: httpx.AsyncClient
    settled: list[Settled]

    async def kill(self) -> None:
        await self.silence()
        # Nothing is told to anybody; only that it lived once is forgotten, which takes seconds otherwise.
        self.streams._release()

    async def silence(self) -> None:
        """It does nothing more, but its last sign of life holds."""
        tasks = [*self.streams._loops, *self.streams._tasks]
        for one in self.streams._running.values():
            one.lost = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What it was just asking the store would otherwise be done after its death.
        await asyncio.wrap_future(self.streams._thread.submit(lambda: None))


async def looks(gateway: Gateway, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has looked so often whose streams have lost their gateway."""
    orphans, seen = gateway.state.streams.orphans, [0]

    def counted(*args: Any) -> Any:
        seen[0] += 1
        return orphans(*args)

    with monkeypatch.context() as patched:
        patched.setattr(gateway.state.streams, "orphans", counted)
        await until(lambda: seen[0] >= count)


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Lost]]]:
    monkeypatch.setattr(streams, "BEAT_S", 0.02)
    monkeypatch.setattr(streams, "GROUP_S", 0.001)
    monkeypatch.setattr(streams, "LOOK_S", 0.01)
    made: list[Lost] = []

    async def make(
        worker: Worker,
        keys: tuple[str, ...] = (KEY,),
        record: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> Lost:
        """``record``: fields of the models' records that are other than theirs."""
        fields = {"account": "local", "cluster_secret": "s", "home": str(tmp_path), "profile": "local", **settings}
        gateway: Lost

        async def call(model: Any, method: Any, asked: GenerateCall, *_: Any) -> Generated:
            worker.calls.append(asked)
            text = worker.texts[asked.sampling.seed // 1000][asked.sampling.seed % 1000]
            ids = model.tokenizer.encode(text, add_special_tokens=False)
            stream = gateway.inbox._streams[asked.id]
            at = asked.resumed
            while at < len(ids):
                if at == worker.let:
                    worker.held += 1
                if at >= worker.let:
                    await worker.on.wait()
                upto = min(at + worker.step, worker.let if at < worker.let else len(ids), len(ids))
                step = tuple(map(int, ids[at:upto]))
                cached = 3 if at == asked.resumed else None
                finish = "stop" if upto == len(ids) else None
                logprobs = (
                    tuple(TokenLogprobs(-i / 7, []) for i in step) if asked.sampling.logprobs is not None else None
                )
                stream.feed(TokenItem(asked.id, at, step, finish, logprobs, cached))
                at = upto
                await asyncio.sleep(0)
            return Generated("stop", 3, PromptPath())

        gateway = Lost(GatewaySettings(key_hashes=tuple(map(hash_key, keys)), **fields), call)
        for model in gateway.models:
            model.ready = True
            model.record = model.record.model_copy(update=dict(record))
        await gateway.inbox.start()
        transport = httpx.ASGITransport(build_http(gateway), root_path="/below")
        headers = {"Authorization": f"Bearer {keys[0]}"}
        gateway.http = httpx.AsyncClient(transport=transport, base_url="http://here/below", headers=headers)
        gateway.settled = []
        gateway.settlement.subscribers.append(gateway.settled.append)
        gateway.streams.start()
        made.append(gateway)
        return gateway

    yield make
    for gateway in made:
        await gateway.http.aclose()
        await gateway.streams.aclose()
        await gateway.inbox.aclose()
        gateway.state.close()
