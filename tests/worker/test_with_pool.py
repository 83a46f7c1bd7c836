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
from tests.waiting import until

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
    """Tokens of ``ids`` that a worker which has never seen them gets from the pool."""
    missing = await worker.generate(replace(caller.call([*ids, 5], **sampling), prefill_above=0))
    assert isinstance(missing, Missing)
    return missing.cached


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

    async def filled() -> bool:
        return (await caller.prefill(prefill, ids)).cached > 0 and await held(caller, other, ids[:-1]) == 299

    await until(filled)


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


async def test_states_are_handed_over_as_well(ray_cluster, caller, tmp_path):
    """Of a model whose layers keep any; a third worker finds those of the prompt's last border."""
    path = tiny.write_checkpoint(tmp_path / "tiny", "qwen3_next")
    reference = tiny.load_reference(path)
    started = [workers.start(path, stage) for stage in ("decode", "prefill", "decode")]
    try:
        decode, prefill, other = started
        ids = prompt(24, 700)
        wanted = tiny.reference_tokens(reference, ids, 20, eos_token_id=None)
        answer, result = await handed_over(caller, decode, prefill, ids, max_tokens=20)
        assert answer == wanted and (result.path.prefilled, result.path.computed) == (699, 1)
        call = caller.call(ids, max_tokens=20)
        answer, result = await caller.follow(call, other)
        assert answer == wanted and (result.path.node, result.path.computed) in ((699, 1), (672, 28))
    finally:
        for worker in started:
            ray.kill(worker.actor)


@pytest.mark.slow
async def test_an_aborted_hand_over_leaves_nothing_behind(actors, caller):
    decode, _, _ = actors
    ids = prompt(23, 700)
    call = replace(caller.call(ids), prefill_above=1)
    assert isinstance(await decode.generate(call), Missing)
    running = asyncio.ensure_future(decode.arriving(ArrivingCall(call.id)))
    node = ray.get_runtime_context().get_node_id()
    pool = ray.get_actor(f"kvpool:{node}", "serve_app")

    async def promised() -> bool:
        return bool((await pool.stats.remote())["announced"])

    async def taken_back() -> bool:
        return not await promised()

    await until(promised)
    await decode.abort(call.id)
    assert await running == Failed("aborted")
    await until(taken_back)
