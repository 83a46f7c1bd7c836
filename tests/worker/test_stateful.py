"""Workers whose model keeps states: they go on from each other's, and answer as transformers does."""

from __future__ import annotations

import numpy as np
import pytest
import pytest_asyncio

from serve_app.wire.generate import ArrivingCall, Missing, PrefillDone, Prefilled
from serve_app.worker import kv_read
from tests import tiny
from tests.worker.world import MemoryPool, call, prefill_call, read, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3_next")


@pytest.fixture(scope="module")
def expected(model):
    reference = tiny.load_reference(model)
    return lambda ids: tiny.reference_tokens(reference, ids, 16, eos_token_id=None)


@pytest.fixture(scope="module")
def pool():
    return MemoryPool()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decode(model, pool):
    work = start(model, "decode", pool, speculate_tokens=4, ngram=True)
    yield work
    await work.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(model, pool):
    work = start(model, "prefill", pool, max_batch_tokens=130)
    yield work
    await work.aclose()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


@pytest.mark.parametrize("length", [2, 33, 258, 300, 520])
async def test_prefill_hands_states_over(decode, prefill, inbox, expected, length):
    """Behind any token: the end of a prompt is mostly within a block."""
    ids = prompt(length, length)
    asked = call(ids, inbox, prefill_above=1)
    assert await decode.generate(asked) == Missing(length - 1, 0)
    done = await prefill.prefill(prefill_call(ids))
    assert isinstance(done, PrefillDone)
    await decode.prefilled(Prefilled(asked.id, done.cached, done.node))
    tokens, result = await read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id)))
    assert tokens == expected(ids)
    assert (result.path.prefilled, result.path.computed) == (length - 1, 1)


async def test_another_worker_finds_the_last_border_of_a_prompt(decode, prefill, inbox, expected):
    ids = prompt(1, 400)
    first, second, again = (call(ids, inbox) for _ in range(3))
    tokens, result = await read(inbox, first, lambda: decode.generate(first))
    assert (tokens, result.cached) == (expected(ids), 0)
    await decode._publisher.published(first.id)
    tokens, result = await read(inbox, second, lambda: prefill.generate(second))
    assert (tokens, result.cached, result.path.node) == (expected(ids), 384, 384)
    tokens, result = await read(inbox, again, lambda: decode.generate(again))
    assert (tokens, result.cached, result.path.own) == (expected(ids), 384, 384)


async def test_without_the_states_a_prompt_is_computed(decode, prefill, inbox, pool, expected):
    """Its keys and values alone are of no use."""
    ids = prompt(2, 300)
    assert isinstance(await prefill.prefill(prefill_call(ids)), PrefillDone)
    for chunk in pool.chunks.chunk_ids:
        if pool.chunks.meta(chunk).layout.startswith("states"):
            pool.chunks.remove(chunk)
    asked = call(ids, inbox)
    tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
    assert (tokens, result.cached) == (expected(ids), 0)


async def test_a_prefill_that_brings_nothing_is_not_waited_for(decode, inbox, expected, monkeypatch):
    monkeypatch.setattr(kv_read, "STALL_S", 0.1)
    ids = prompt(18, 300)
    asked = call(ids, inbox, prefill_above=1)
    assert isinstance(await decode.generate(asked), Missing)
    tokens, result = await read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id)))
    assert tokens == expected(ids) and result.path.computed == 300
