"""Requests with adapters in whole workers: two with real engines, a pool, a file store, and a gateway's inbox."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from serve_app.adapters.weights import read_adapter
from serve_app.state.blobs.adapters import CONFIG, WEIGHTS, blob, content_digest
from serve_app.state.blobs.files import open_files
from serve_app.wire.generate import AdapterAt, ArrivingCall, Failed, Generated, Missing, PrefillDone, Prefilled
from serve_app.wire.load import ADAPTER_BYTES
from tests import tiny
from tests.adapters import made
from tests.waiting import until
from tests.worker.world import MemoryPool, call, prefill_call, read, start

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 5
ADAPTED = ("q_proj", "v_proj", "o_proj", "down_proj")


class Store:
    """A file store with adapters of one model, and what transformers' model answers with each."""

    def __init__(self, folder, where) -> None:
        self.where = str(where)
        self.files = open_files(self.where)
        self.base = tiny.load_reference(folder)
        shapes = {n: tuple(m.weight.shape) for n, m in self.base.named_modules() if n.endswith(ADAPTED)}
        self.given = [(made.config(), made.weights(shapes, seed=seed)) for seed in range(COUNT)]
        self.at = [self.put(*given) for given in self.given]
        self.answers = [self._merged(*given) for given in self.given]

    def put(self, config: bytes, weights: bytes) -> AdapterAt:
        digest = content_digest(config, len(weights))
        digest.update(weights)
        name = digest.hexdigest()
        self.files.put(blob(name, CONFIG), config)
        self.files.put(blob(name, WEIGHTS), weights)
        return AdapterAt(name, len(config) + len(weights))

    def _merged(self, config: bytes, weights: bytes) -> torch.nn.Module:
        model = copy.deepcopy(self.base)
        with torch.no_grad():
            for name, delta in read_adapter(config, weights).deltas.items():
                model.get_submodule(name).weight += delta.scale * delta.b @ delta.a
        return model

    def expected(self, number: int | None, ids: list[int], count: int = 16) -> list[int]:
        model = self.base if number is None else self.answers[number]
        return tiny.reference_tokens(model, ids, count, eos_token_id=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def store(model, tmp_path_factory):
    return Store(model, tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def pool():
    return MemoryPool()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(model, pool, store):
    started = [start(model, stage, pool, adapters=2, files=store.where) for stage in ("decode", "prefill")]
    yield started
    for work in started:
        await work.aclose()


@pytest.fixture
def decode(workers):
    return workers[0]


@pytest.fixture
def prefill(workers):
    return workers[1]


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(workers):
    yield
    for work in workers:
        async with asyncio.timeout(20):
            while len(work.requests) or work.stats().numbers["used_blocks"]:
                await asyncio.sleep(0.01)
        told = work.adapters.stats()
        assert (told["using"], told["waiting"]) == (0, 0)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


@pytest.mark.slow
async def test_more_adapters_than_places_answer_in_one_batch_as_if_merged(decode, inbox, store):
    ids = prompt(1, 70)

    async def ask(number: int | None) -> None:
        asked = call(ids, inbox, adapter=None if number is None else store.at[number])
        tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
        assert isinstance(result, Generated) and tokens == store.expected(number, ids)

    await asyncio.gather(*(ask(number) for number in (None, *range(COUNT), *range(COUNT))))
    assert len({tuple(store.expected(number, ids)) for number in (None, *range(COUNT))}) == COUNT + 1
    told = decode.stats().numbers["adapters"]
    assert told["loaded"] == COUNT and told["placed"] == 2 and told["swaps"] >= COUNT


async def test_caches_know_the_adapter(decode, inbox, store):
    ids = prompt(2, 100)

    async def cached(number: int | None) -> int:
        asked = call(ids, inbox, adapter=None if number is None else store.at[number])
        tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
        assert tokens == store.expected(number, ids)
        return result.cached

    assert [await cached(n) for n in (0, 1, None)] == [0, 0, 0]
    assert [await cached(n) for n in (0, 1, None)] == [96, 96, 96]


async def test_prefill_elsewhere_computes_with_the_same_adapter(decode, prefill, inbox, store):
    ids = prompt(3, 300)
    asked = call(ids, inbox, prefill_above=1, adapter=store.at[3])
    assert await decode.generate(asked) == Missing(299, 0)
    # One that waits for prefill keeps no place from others.
    assert decode.adapters.stats()["using"] == 0
    following = asyncio.ensure_future(read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id))))
    done = await prefill.prefill(prefill_call(ids, adapter=store.at[3]))
    assert isinstance(done, PrefillDone)
    await decode.prefilled(Prefilled(asked.id, done.cached, done.node))
    tokens, result = await following
    assert tokens == store.expected(3, ids) and result.path.prefilled == 299


async def test_a_request_that_is_aborted_while_it_waits_for_a_place_ends(decode, inbox, store):
    ids = prompt(4, 40)
    # Two requests that do not end.
    for number in (0, 1):
        assert await decode.adapters.place(f"long-{number}", store.at[number], asyncio.Future())
    third = call(ids, inbox, adapter=store.at[2])
    waiting = asyncio.ensure_future(decode.generate(third))
    await until(lambda: decode.adapters.stats()["waiting"] == 1)
    # Base requests go on beside it.
    plain = call(ids, inbox)
    assert (await read(inbox, plain, lambda: decode.generate(plain)))[0] == store.expected(None, ids)
    assert not waiting.done()
    await decode.abort(third.id)
    assert await waiting == Failed("aborted")
    for number in (0, 1):
        decode.adapters.release(f"long-{number}")


async def test_adapters_that_are_gone_damaged_or_of_another_model_are_refused(decode, inbox, store):
    ids = prompt(5, 10)
    at = store.put(made.config(r=2), made.weights({"model.layers.0.self_attn.q_proj": (8, 8)}, rank=2))
    damaged = store.put(made.config(lora_alpha=3), made.weights({}))
    store.files.put(blob(damaged.digest, WEIGHTS), made.weights({"model.layers.0.self_attn.q_proj": (8, 8)}))
    for adapter, why in (
        (AdapterAt("0" * 64, 10), "gone; upload"),
        (damaged, "damaged; upload"),
        (at, "another model"),
        (AdapterAt("1" * 64, 1 << 40), "cache_bytes"),
    ):
        result = await decode.generate(call(ids, inbox, adapter=adapter))
        assert isinstance(result, Failed) and result.refused and why in result.error


async def test_another_worker_may_reach_files_that_this_one_cannot(decode, prefill, inbox, store, monkeypatch):
    ids = prompt(6, 10)
    at = store.put(made.config(lora_alpha=5), store.given[0][1])
    loads = decode.adapters._load

    def away(wanted: AdapterAt) -> None:
        raise OSError("the bucket does not answer")

    monkeypatch.setattr(decode.adapters, "_load", away)
    result = await decode.generate(call(ids, inbox, adapter=at))
    assert isinstance(result, Failed) and not result.refused
    monkeypatch.setattr(decode.adapters, "_load", loads)
    asked = call(ids, inbox, adapter=at)
    assert isinstance((await read(inbox, asked, lambda: decode.generate(asked)))[1], Generated)


async def test_64_streams_have_a_token_of_every_step_while_an_adapter_is_loaded(model, pool, store, inbox):
    """The load ends only when so many steps have been made beside it: were one to wait for it, nothing would end."""
    work = start(model, "decode", pool, adapters=2, files=store.where, max_num_seqs=66, kv_cache_bytes=64 << 20)
    loop, load, steps = work._engine_loop, work.adapters._load, 40
    known: list[list[int]] = []

    def told() -> list[int]:
        running = work._engine.scheduler.running
        return [loop.steps, *(len(r.tokens) for r in sorted(running, key=lambda r: r.id) if r.adapter == 0)]

    def slow(at: AdapterAt) -> Any:
        known.append(loop.call(lambda engine: told()).result())
        while loop.steps < known[0][0] + steps:
            time.sleep(0.001)
        known.append(loop.call(lambda engine: told()).result())
        return load(at)

    work.adapters._load = slow
    streams = [call(prompt(100 + number, 8), inbox, max_tokens=900) for number in range(64)]
    try:
        running = [asyncio.ensure_future(read(inbox, each, lambda each=each: work.generate(each))) for each in streams]
        await until(lambda: sum(r.output_len > 0 for r in list(work._engine.scheduler.running)) == 64)
        ids = prompt(8, 40)
        through = call(ids, inbox, adapter=store.at[4])
        tokens, _ = await read(inbox, through, lambda: work.generate(through))
        assert tokens == store.expected(4, ids)
        before, after = known
        assert len(before) == len(after) == 65
        grown = [now - then for then, now in zip(before, after, strict=True)]
        assert set(grown) == {grown[0]} and grown[0] >= steps
        for each in streams:
            await work.abort(each.id)
        await asyncio.gather(*running)
    finally:
        await work.aclose()


async def test_a_worker_tells_which_adapters_it_has_and_what_loading_took(model, pool, store):
    work = start(model, "decode", pool, adapters=2, files=store.where)
    try:
        for number in (0, 1, 0):
            assert isinstance(await work.generate(call(prompt(7, 10), adapter=store.at[number])), Generated)
        told = work._load._measure()
        names = [bytes.fromhex(store.at[number].digest)[:ADAPTER_BYTES] for number in (0, 1)]
        assert told.adapters == b"".join(names)
        assert [(f.tier, f.tokens) for f in told.fetches if f.tier == "adapter"] == [
            ("adapter", store.at[n].size) for n in (0, 1)
        ]
        work._load._told()
        assert work._load._measure().fetches == ()
    finally:
        await work.aclose()


async def test_a_worker_without_places_refuses_adapters(model, pool, store):
    work = start(model, "decode", pool)
    try:
        result = await work.generate(call(prompt(7, 10), adapter=store.at[0]))
        assert isinstance(result, Failed) and result.refused and "lora: true" in result.error
        assert work.stats().numbers["adapters"] is None
    finally:
        await work.aclose()
