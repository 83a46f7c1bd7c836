"""Workers and the pool between them: what one has computed another finds, and no answer changes by it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import ray
from msgspec.structs import replace

from serve_app.wire.generate import ArrivingCall, Failed, Missing, Prefilled
from tests import tiny
from tests.deployments import workers
from tests.deployments.workers import Caller

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def actors(ray_cluster, model):
    """(decode, another decode, prefill)"""
    started = [workers.start(model, stage) for stage in ("decode", "decode", "prefill")]
    ray.get([worker.actor.ready.remote() for worker in started])
    yield started
    for worker in started:
        ray.kill(worker.actor)


@pytest.fixture(scope="module")
def expected(model):
    reference = tiny.load_reference(model)
    return lambda ids, count: tiny.reference_tokens(reference, ids, count, eos_token_id=None)


@pytest.fixture
async def caller():
    async with Caller() as caller:
        yield caller


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


async def held(caller, worker, ids: list[int], **sampling) -> int:
    """Tokens of ``ids`` that a worker which has never seen them gets from the pool, once publishing is done."""
    found = -1
    for _ in range(100):
        missing = await worker.generate(replace(caller.call([*ids, 5], **sampling), prefill_above=0))
        assert isinstance(missing, Missing)
        if missing.cached == found and found > 0:
            break
        found = missing.cached
        await asyncio.sleep(0.1)
    return found


async def test_the_next_turn_finds_what_another_worker_generated(actors, caller, expected):
    decode, other, _ = actors
    first = prompt(1, 40)
    answer, _ = await caller.generate(decode, first, max_tokens=100)
    assert answer == expected(first, 100)
    # 139 tokens have K/V; those that fill blocks are published.
    assert await held(caller, other, first + answer) == 128
    turn = first + answer + prompt(2, 20)
    second, result = await caller.generate(other, turn, max_tokens=30)
    assert second == expected(turn, 30)
    assert result.cached == 128


async def test_a_retry_finds_the_whole_chunks_of_an_answer_that_was_never_finished(actors, caller, expected):
    decode, other, _ = actors
    first = prompt(3, 40)
    call = caller.call(first, max_tokens=900)
    running = asyncio.ensure_future(caller.follow(call, decode))
    tokens = expected(first, 300)
    assert await held(caller, other, first + tokens[:240]) == 256
    await decode.abort(call.id)
    running.cancel()
    rest, result = await caller.generate(other, first + tokens[:240], max_tokens=20)
    assert rest == expected(first + tokens[:240], 20) and result.cached >= 256


async def test_an_answer_cut_short_by_its_client_is_published(actors, caller):
    decode, other, _ = actors
    first = prompt(4, 100)
    call = caller.call(first, max_tokens=900)
    running = asyncio.ensure_future(caller.follow(call, decode))
    while not (await decode.stats()).numbers["running"]:
        await asyncio.sleep(0.01)
    await decode.abort(call.id)
    running.cancel()
    assert await held(caller, other, first) >= 96


async def test_what_one_tenant_generates_is_not_there_for_another(actors, caller):
    decode, other, _ = actors
    first = prompt(5, 200)
    await caller.generate(decode, first, max_tokens=60)
    assert await held(caller, other, first) == 192
    result = await other.generate(replace(caller.call([*first, 5], salt=b"another tenant"), prefill_above=0))
    assert result.cached == 0


async def test_a_prefill_publishes_again_what_only_its_engine_still_holds(actors, caller):
    _, other, prefill = actors
    ids = prompt(6, 300)
    await caller.prefill(prefill, ids)
    node = ray.get_runtime_context().get_node_id()
    pool = ray.get_actor(f"kvpool:{node}", "serve_app")
    before = (await pool.stats.remote())["chunks"]
    assert before >= 2
    # A new pool knows nothing; the prefill worker's own cache has it all.
    ray.kill(pool, no_restart=False)
    for _ in range(50):
        if (await caller.prefill(prefill, ids)).cached and await held(caller, other, ids[:-1]) == 299:
            return
    pytest.fail("the new pool was not filled")


# --- the hand-over --------------------------------------------------------------------------------


async def handed_over(caller, decode, prefill, ids, *, prefilling=None, **sampling):
    """What a decode replica does; ``prefilling`` stands in for the prefill worker's part."""
    call = replace(caller.call(ids, **sampling), prefill_above=1)
    assert isinstance(await decode.generate(call), Missing)
    running = asyncio.ensure_future(caller.follow(call, decode, arriving=True))
    done = await (prefilling or caller.prefill)(prefill, ids)
    await decode.prefilled(Prefilled(call.id, done.cached, done.node) if done is not None else Prefilled(call.id))
    return await running


async def test_decode_takes_over_what_prefill_computes(actors, caller, expected):
    decode, _, prefill = actors
    ids = prompt(20, 900)
    answer, result = await handed_over(caller, decode, prefill, ids, max_tokens=20)
    assert answer == expected(ids, 20)
    path = result.path
    # Everything but the last token, whose logits decode needs.
    assert (path.own, path.node, path.prefilled, path.computed) == (0, 0, 899, 1) and result.cached == 0
    assert path.early_bytes <= path.bytes and 0 <= path.handover_share < 1


async def test_chunks_are_taken_while_prefill_goes_on(actors, caller, expected):
    decode, _, prefill = actors
    ids = prompt(21, 900)
    before = (await decode.stats()).numbers["cached_blocks"]

    async def in_halves(worker, ids):
        first = await caller.prefill(worker, ids[:513])
        # Decode's engine has them before the rest exists.
        while (await decode.stats()).numbers["cached_blocks"] < before + 16:
            await asyncio.sleep(0.05)
        await caller.prefill(worker, ids)
        return first

    answer, result = await handed_over(caller, decode, prefill, ids, prefilling=in_halves, max_tokens=20)
    assert answer == expected(ids, 20)
    assert result.path.prefilled == 899 and result.path.early_bytes >= result.path.bytes // 2


async def test_decode_computes_what_a_lost_prefill_leaves(actors, caller, expected):
    decode, _, prefill = actors
    ids = prompt(22, 700)

    async def dies_half_way(worker, ids):
        await caller.prefill(worker, ids[:400])
        return None

    answer, result = await handed_over(caller, decode, prefill, ids, prefilling=dies_half_way, max_tokens=20)
    assert answer == expected(ids, 20)
    assert result.path.prefilled == 384 and result.path.computed == 316


async def test_an_aborted_hand_over_leaves_nothing_behind(actors, caller):
    decode, _, _ = actors
    ids = prompt(23, 700)
    call = replace(caller.call(ids), prefill_above=1)
    assert isinstance(await decode.generate(call), Missing)
    running = asyncio.ensure_future(decode.arriving(ArrivingCall(call.id)))
    node = ray.get_runtime_context().get_node_id()
    pool = ray.get_actor(f"kvpool:{node}", "serve_app")
    while not (await pool.stats.remote())["announced"]:
        await asyncio.sleep(0.01)
    await decode.abort(call.id)
    assert await running == Failed("aborted")
    for _ in range(100):
        if not (await pool.stats.remote())["announced"]:
            return
        await asyncio.sleep(0.05)
    pytest.fail("keys are still promised")
