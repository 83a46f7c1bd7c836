"""What workers publish: the next turn, a retry and another worker find it, and another tenant does not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from serve_app.channel.inbox import TokenInbox
from serve_app.wire.generate import ArrivingCall, Missing, PrefillDone, Prefilled
from tests import tiny
from tests.waiting import until
from tests.worker.world import MemoryPool, call, prefill_call, read, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(tmp_path_factory):
    """(decode, another decode, prefill, an inbox, expected tokens)"""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")
    pool, reference, inbox = MemoryPool(), tiny.load_reference(path), TokenInbox()
    await inbox.start()
    works = [start(path, stage, pool) for stage in ("decode", "decode", "prefill")]
    yield *works, inbox, lambda ids, count: tiny.reference_tokens(reference, ids, count, eos_token_id=None)
    for work in works:
        await work.aclose()
    await inbox.aclose()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


async def held(work, ids: list[int], salt: bytes | None = None) -> int:
    """Tokens of ``ids`` that a worker which has never seen them would get from the pool."""
    asked = call([*ids, 5], prefill_above=0)
    missing = await work.generate(asked if salt is None else replace(asked, salt=salt))
    assert isinstance(missing, Missing)
    await work.abort(asked.id)
    return missing.cached


async def until_held(work, ids: list[int], tokens: int) -> None:
    async def found() -> bool:
        return await held(work, ids) >= tokens

    await until(found)


async def answered(work, inbox, ids: list[int], **sampling):
    asked = call(ids, inbox, **sampling)
    return await read(inbox, asked, lambda: work.generate(asked))


async def test_the_next_turn_finds_what_another_worker_generated(parts):
    decode, other, _, inbox, expected = parts
    first = prompt(1, 40)
    answer, _ = await answered(decode, inbox, first, max_tokens=100)
    # 139 tokens have K/V; those that fill blocks are published.
    await until_held(other, first + answer, 128)
    assert await held(other, first + answer) == 128
    turn = first + answer + prompt(2, 20)
    second, result = await answered(other, inbox, turn, max_tokens=30)
    assert second == expected(turn, 30) and result.cached == 128


@pytest.mark.slow
async def test_a_retry_finds_the_whole_chunks_of_an_answer_that_was_never_finished(parts):
    decode, other, _, inbox, expected = parts
    first = prompt(3, 40)
    asked = call(first, inbox, max_tokens=900)
    running = asyncio.ensure_future(read(inbox, asked, lambda: decode.generate(asked)))
    tokens = expected(first, 300)
    await until_held(other, first + tokens[:240], 256)
    await decode.abort(asked.id)
    await running
    rest, result = await answered(other, inbox, first + tokens[:240], max_tokens=20)
    assert rest == expected(first + tokens[:240], 20) and result.cached >= 256


async def test_an_answer_cut_short_by_its_client_is_published(parts):
    decode, other, _, inbox, _ = parts
    first = prompt(4, 100)
    asked = call(first, inbox, max_tokens=900)
    running = asyncio.ensure_future(read(inbox, asked, lambda: decode.generate(asked)))
    await until(lambda: decode.stats().numbers["running"])
    await decode.abort(asked.id)
    await running
    await until_held(other, first, 96)


async def test_what_one_tenant_generates_is_not_there_for_another(parts):
    decode, other, _, inbox, _ = parts
    first = prompt(5, 200)
    await answered(decode, inbox, first, max_tokens=60)
    await until_held(other, first, 192)
    assert await held(other, first, salt=b"another tenant") == 0


async def test_chunks_are_taken_while_prefill_goes_on(parts):
    decode, _, prefill, inbox, expected = parts
    ids = prompt(21, 900)
    before = decode.stats().numbers["cached_blocks"]
    asked = call(ids, inbox, prefill_above=1, max_tokens=20)
    assert await decode.generate(asked) == Missing(899, 0)
    following = asyncio.ensure_future(read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id))))
    first = await prefill.prefill(prefill_call(ids[:513]))
    # Decode's engine has them before the rest exists.
    await until(lambda: decode.stats().numbers["cached_blocks"] >= before + 16)
    assert isinstance(await prefill.prefill(prefill_call(ids)), PrefillDone)
    await decode.prefilled(Prefilled(asked.id, first.cached, first.node))
    answer, result = await following
    assert answer == expected(ids, 20)
    assert result.path.prefilled == 899 and result.path.early_bytes >= result.path.bytes // 2
