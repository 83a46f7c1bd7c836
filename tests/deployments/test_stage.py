"""Replicas of decode and prefill with their workers in this process: every call and answer is bytes at each border, as
Ray carries them, and nothing of Ray runs.
"""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import ray
from msgspec.structs import replace

from deployments.decode import Decode
from deployments.prefill import Prefill
from deployments.stage import EngineStage
from deployments.supervisor import Supervisor
from deployments.worker import EngineWorker
from serve_app.channel.inbox import TokenInbox
from serve_app.wire.generate import HERE, CollectCall, Generated, PrefillAt
from serve_app.wire.load import LoadReport
from serve_app.wire.message import WrongVersion
from serve_app.wire.methods import ALL_STATS, COLLECT, GENERATE, PROBE, SUBSCRIBE, WAKE, Method
from serve_app.wire.replicas import Nothing, Subscribe
from tests import tiny
from tests.waiting import until
from tests.worker.world import MemoryPool, call, read, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Handle:
    """Calls an object's methods as a Ray handle does: arguments and answers are what Ray would carry."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given, **named: self._called(name, given, named))

    def _called(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> asyncio.Future[Any]:
        assert all(isinstance(one, bytes | str) for one in given), given
        self.calls.append((name, named))
        return asyncio.ensure_future(getattr(self.target, name)(*given, **named))


def worker(work: Any) -> Handle:
    """The actor around ``work``."""
    kind = EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    actor = kind.__new__(kind)
    actor._work = work
    return Handle(actor)


async def replica(deployment: Any, actor: Handle, name: str) -> Any:
    kind = deployment.func_or_class
    named = type(name, (kind,), {"replica_id": name})
    made = named.__new__(named)
    EngineStage.__init__(made)
    made.supervisor = Supervisor(lambda: actor, lambda started: EngineStage.greet(made, started))
    await made.supervisor.begin()
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(tmp_path_factory):
    """(decode replica, prefill replica, the handle of prefill, expected tokens)"""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")
    pool = MemoryPool()
    works = start(path, "decode", pool), start(path, "prefill", pool)
    decode = await replica(Decode, worker(works[0]), "d1")
    prefill = await replica(Prefill, worker(works[1]), "p1")
    handle = Handle(prefill)
    decode._prefill, decode._draft, decode._min_remote, decode.role = None, None, 64, "decode"
    decode.prefill_elsewhere(handle)
    reference = tiny.load_reference(path)
    yield decode, prefill, handle, lambda ids, count: tiny.reference_tokens(reference, ids, count, eos_token_id=None)
    for work in works:
        await work.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def inbox():
    inbox = TokenInbox()
    await inbox.start()
    yield inbox
    await inbox.aclose()


async def asked(target: Any, method: Method, message: Any, **wish: str) -> Any:
    return method.result(await getattr(target, method.name)(message.encode(), **wish))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


async def test_a_long_prompt_is_computed_by_prefill_and_a_short_one_is_not(parts, inbox):
    decode, _, handle, expected = parts
    for seed, length, elsewhere in ((1, 300, 299), (2, 40, 0)):
        ids, before = prompt(seed, length), len(handle.calls)
        request = call(ids, inbox)
        tokens, result = await read(inbox, request, lambda request=request: asked(decode, GENERATE, request))
        assert tokens == expected(ids, 16)
        assert isinstance(result, Generated) and result.replica == "d1"
        assert (result.path.prefilled, result.path.computed) == (elsewhere, length - elsewhere)
        assert handle.calls[before:] == ([("prefill", {"replica": ""})] if elsewhere else [])


async def test_the_request_says_who_prefills(parts, inbox):
    decode, prefill, handle, expected = parts
    for seed, where, names in ((3, HERE, []), (4, PrefillAt("prefill", "p1"), [("prefill", {"replica": "p1"})])):
        ids, before = prompt(seed, 200), len(handle.calls)
        request = replace(call(ids, inbox), prefill=where)
        tokens, _ = await read(inbox, request, lambda request=request: asked(decode, GENERATE, request, replica="d1"))
        assert tokens == expected(ids, 16) and handle.calls[before:] == names
    # Stages are preferences: a prefill replica generates as well.
    request = call(prompt(5, 200), inbox)
    tokens, result = await read(inbox, request, lambda: asked(prefill, GENERATE, request))
    assert tokens == expected(prompt(5, 200), 16) and result.replica == "p1"


async def test_a_prefill_stage_that_fails_costs_time_and_nothing_else(parts, inbox, monkeypatch):
    decode, prefill, _, expected = parts

    async def fails(message: bytes, replica: str = "") -> bytes:
        raise RuntimeError("the node has gone")

    monkeypatch.setattr(prefill, "prefill", fails, raising=False)
    request = call(prompt(6, 300), inbox)
    tokens, result = await read(inbox, request, lambda: asked(decode, GENERATE, request))
    assert tokens == expected(prompt(6, 300), 16) and result.path.computed == 300


async def test_a_cancelled_call_leaves_nothing_in_the_worker(parts, inbox, monkeypatch):
    decode, prefill, _, _ = parts
    work = decode.supervisor._worker.target._work

    async def never(message: bytes, replica: str = "") -> bytes:
        await asyncio.sleep(60)
        return b""

    monkeypatch.setattr(prefill, "prefill", never, raising=False)
    for ids, busy in (
        (prompt(7, 300), lambda: len(work.requests)),
        (prompt(8, 30), lambda: work.stats().numbers["running"]),
    ):
        running = asyncio.ensure_future(asked(decode, GENERATE, call(ids, inbox, max_tokens=900)))
        async with asyncio.timeout(60):
            while not busy():
                if running.done():  # it has ended between two looks
                    running = asyncio.ensure_future(asked(decode, GENERATE, call(ids, inbox, max_tokens=900)))
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            while len(work.requests) or work.stats().numbers["used_blocks"]:
                await asyncio.sleep(0.01)


async def test_gateways_subscribe_and_ask(parts, monkeypatch):
    # Ray would start a cluster of its own to answer that.
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node-1"))
    decode, prefill, _, _ = parts
    heard: list[LoadReport] = []
    inbox = TokenInbox(on_load=lambda _, report: report is not None and heard.append(report))
    await inbox.start()
    told = Subscribe(inbox.address, 30.0, {"decode": 1.5}, {"d1": "mixed"})
    assert (await asked(decode, SUBSCRIBE, told)).replica == "d1"
    assert (await asked(prefill, SUBSCRIBE, told)).replica == "p1"
    await until(lambda: {(r.replica, r.role) for r in heard} == {("d1", "mixed"), ("p1", "prefill")})
    assert await decode.record_autoscaling_stats() == {"needed_replicas": 1.5}
    [counters] = (await asked(decode, ALL_STATS, Nothing())).workers
    assert counters.stage == "decode" and not counters.silent and counters.shown()["running"] == 0
    assert counters.shown()["node"] == "node-1" and not ray.is_initialized()
    assert (await asked(decode, COLLECT, CollectCall("nobody", 0))).items == ()
    assert await asked(decode, PROBE, Nothing()) == await asked(prefill, WAKE, Nothing()) == Nothing()
    await inbox.aclose()


async def test_a_call_of_another_version_is_refused_by_name(parts, inbox):
    decode, _, _, _ = parts
    # As many digits: the tag's length stands before it.
    told = call(prompt(9, 50), inbox).encode()
    other = re.sub(rb"(?<=generate:)\d+", lambda found: b"9" * len(found[0]), told, count=1)
    with pytest.raises(WrongVersion, match="generate of version 9+"):
        await decode.generate(other)
