"""What a worker does with its calls, without Ray: two workers with real engines, a pool, and a gateway's inbox."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from serve_app.catalog.load import PROJECT_ROOT
from serve_app.channel.inbox import TokenInbox
from serve_app.kv.cached_tokens import SOURCES
from serve_app.wire.generate import (
    AdapterAt,
    ArrivingCall,
    CollectCall,
    Failed,
    Generated,
    GenerateMany,
    Missing,
    PrefillDone,
    Prefilled,
    read_ending,
)
from serve_app.wire.replicas import Listen
from serve_app.worker import engine_work, kv_read, requests
from tests import tiny
from tests.waiting import until
from tests.worker.world import MemoryPool, call, prefill_call, read, read_items, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", vocab_size=6144)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # for grammars
        shutil.copy(PROJECT_ROOT / "checkpoints" / "pico-instruct" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    reference = tiny.load_reference(model)
    return lambda ids, count: tiny.reference_tokens(reference, ids, count, eos_token_id=None)


@pytest.fixture(scope="module")
def pool():
    return MemoryPool()


@pytest.fixture(scope="module")
def decode(model, pool):
    return start(model, "decode", pool)


@pytest.fixture(scope="module")
def prefill(model, pool):
    return start(model, "prefill", pool)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def closed(decode, prefill):
    yield
    for work in (decode, prefill):
        await work.aclose()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_left(decode, prefill):
    yield
    for work in (decode, prefill):
        await until(lambda work=work: not len(work.requests) and not work.stats().numbers["used_blocks"])


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


@pytest.mark.slow
async def test_requests_that_come_together_end_one_by_one(decode, inbox, expected):
    """Each with its own tokens and its own fault, told when it ends and once more when all have."""
    told: dict[str, Generated | Failed] = {}
    inbox.on_ended = lambda name, result: told.update({name: read_ending(result)})
    await decode.subscribe(Listen(inbox.address, 60.0, "a replica", "decode"))
    await until(lambda: inbox.workers)
    prompts, lengths = [prompt(seed, 40 + seed) for seed in (11, 12)], (4, 100)
    short, long = (call(ids, inbox, max_tokens=count) for ids, count in zip(prompts, lengths, strict=True))
    bad = call(prompt(13, 20), inbox, grammar="start: no such thing")
    unplaced = replace(call(prompt(14, 20), inbox), adapter=AdapterAt("0" * 64, 1))

    def end_of(name: str):
        async def told_of() -> Generated | Failed:
            return await until(lambda: told.get(name))

        return told_of

    reading = [asyncio.ensure_future(read(inbox, one, end_of(one.id))) for one in (short, long)]
    results = (await decode.generate_many(GenerateMany((short, bad, unplaced, long)), "a replica")).results
    for (tokens, result), ids, count in zip(await asyncio.gather(*reading), prompts, lengths, strict=True):
        assert tokens == expected(ids, count)
        assert (result.finish, result.replica) == ("length", "a replica")
    await until(lambda: len(told) == 4)
    # The short one had ended before the long one, and the faulty ones before both.
    assert list(told)[-1] == long.id and list(told)[-2] == short.id
    assert results == tuple(told[one.id] for one in (short, bad, unplaced, long))
    assert told[bad.id].refused and told[unplaced.id].refused


async def test_tokens_and_where_the_prompt_came_from(decode, inbox, expected):
    ids = prompt(1, 100)
    asked = call(ids, inbox)
    tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
    assert tokens == expected(ids, 16) and (result.finish, result.cached) == ("length", 0)
    again = call(ids, inbox)
    tokens, second = await read(inbox, again, lambda: decode.generate(again))
    assert tokens == expected(ids, 16) and second.cached == second.path.own == 96
    for path in (result.path, second.path):
        assert sum(getattr(path, source) for source in SOURCES) == 100 and path.ttft_s > 0


async def test_a_prompt_prefilled_elsewhere_is_registered_hashed_and_compiled_once(
    decode, prefill, inbox, expected, monkeypatch
):
    counts: Counter[str] = Counter()

    def counted(name, function):
        return lambda *given, **named: (counts.update([name]), function(*given, **named))[1]

    masks = decode._engine.runner.masks
    monkeypatch.setattr(masks, "compile", counted("compiled", masks.compile))
    monkeypatch.setattr(kv_read, "block_keys", counted("hashed", kv_read.block_keys))
    ids = prompt(2, 300)
    asked = call(ids, inbox, prefill_above=1, grammar="start: /[a-z ]{40}/")
    plain = call(ids, inbox, grammar="start: /[a-z ]{40}/")
    monkeypatch.setattr(decode.requests, "register", counted("registered", decode.requests.register))

    missing = await decode.generate(asked)
    assert missing == Missing(299, 0) and asked.id in decode.requests
    following = asyncio.ensure_future(read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id))))
    assert counts == {"hashed": 1, "compiled": 1, "registered": 1}
    done = await prefill.prefill(prefill_call(ids))
    assert isinstance(done, PrefillDone) and done.cached == 0
    await decode.prefilled(Prefilled(asked.id, done.cached, done.node))
    tokens, result = await following
    assert (result.path.prefilled, result.path.computed, result.cached) == (299, 1, 0)
    # One more hash, for the prefill worker's own registration.
    assert counts == {"hashed": 2, "compiled": 1, "registered": 1}
    assert (await read(inbox, plain, lambda: decode.generate(plain)))[0] == tokens


async def test_news_of_prefill_may_come_before_the_second_call(decode, prefill, inbox, expected):
    ids = prompt(3, 200)
    asked = call(ids, inbox, prefill_above=1)
    assert isinstance(await decode.generate(asked), Missing)
    done = await prefill.prefill(prefill_call(ids))
    await decode.prefilled(Prefilled(asked.id, done.cached, done.node))
    tokens, result = await read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id)))
    assert tokens == expected(ids, 16) and result.path.prefilled == 199


async def test_what_a_failed_prefill_leaves_is_computed(decode, prefill, inbox, pool, expected):
    ids = prompt(4, 400)
    await prefill.prefill(prefill_call(ids[:257]))
    asked = call(ids, inbox, prefill_above=1)
    assert await decode.generate(asked) == Missing(143, 256)
    following = asyncio.ensure_future(read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id))))
    await until(lambda: pool.announced)
    await decode.prefilled(Prefilled(asked.id))
    tokens, result = await following
    assert tokens == expected(ids, 16)
    assert (result.cached, result.path.node, result.path.computed) == (256, 256, 144) and not pool.announced


async def test_a_prefill_that_brings_nothing_is_not_waited_for(decode, inbox, expected, monkeypatch):
    monkeypatch.setattr(kv_read, "STALL_S", 0.1)
    ids = prompt(18, 300)
    asked = call(ids, inbox, prefill_above=1)
    assert isinstance(await decode.generate(asked), Missing)
    tokens, result = await read(inbox, asked, lambda: decode.arriving(ArrivingCall(asked.id)))
    assert tokens == expected(ids, 16) and result.path.computed == 300


async def test_while_the_pool_is_away_nothing_is_prefilled_elsewhere(decode, inbox, pool, expected, monkeypatch):
    monkeypatch.setattr(pool, "away", True)
    ids = prompt(21, 300)
    asked = call(ids, inbox, prefill_above=1)
    tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
    assert tokens == expected(ids, 16) and result.path.computed == 300


async def test_a_second_call_that_never_comes_is_given_up(decode, monkeypatch):
    monkeypatch.setattr(requests, "WAIT_S", 0.1)
    asked = call(prompt(5, 100), prefill_above=1)
    assert isinstance(await decode.generate(asked), Missing)
    await until(lambda: asked.id not in decode.requests)
    late = await decode.arriving(ArrivingCall(asked.id))
    assert isinstance(late, Failed) and not late.refused  # a gateway tries again


async def test_an_abort_ends_a_request_that_waits_for_prefill(decode, pool):
    waiting = call(prompt(6, 100), prefill_above=1)
    assert isinstance(await decode.generate(waiting), Missing)
    await decode.abort(waiting.id)
    assert waiting.id not in decode.requests
    arriving = call(prompt(7, 100), prefill_above=1)
    await decode.generate(arriving)
    taking_over = asyncio.ensure_future(decode.arriving(ArrivingCall(arriving.id)))
    await until(lambda: pool.announced)
    await decode.abort(arriving.id)
    assert await taking_over == Failed("aborted") and not pool.announced


async def begun(decode, inbox, asked) -> asyncio.Task:
    """The call of a request that has a reader and has brought its first tokens."""
    stream = inbox.open_stream(asked.id)
    running = asyncio.ensure_future(decode.generate(asked))
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.wait([running, reading], return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), running.result()
    assert (await reading).ids
    return running


async def test_an_abort_or_a_cancelled_call_frees_the_place_of_a_running_request(decode, inbox):
    asked = call(prompt(8, 50), inbox, max_tokens=900)
    running = await begun(decode, inbox, asked)
    await decode.abort(asked.id)
    assert await running == Failed("aborted")
    left = await begun(decode, inbox, call(prompt(9, 50), inbox, max_tokens=900))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left


async def test_a_gateway_that_does_not_come_back_has_its_requests_given_up(decode, monkeypatch):
    monkeypatch.setattr(engine_work, "INBOX_GRACE_S", 0.05)
    gone = TokenInbox()
    await gone.start()
    asked = call(prompt(10, 50), gone, max_tokens=900)
    stream = gone.open_stream(asked.id)
    running = asyncio.ensure_future(decode.generate(asked))
    await anext(stream)
    await gone.aclose()
    assert await asyncio.wait_for(running, 60) == Failed("aborted")


async def test_a_reader_that_leaves_ends_the_request(decode, inbox):
    asked = call(prompt(11, 50), inbox, max_tokens=900)
    stream = inbox.open_stream(asked.id)
    running = asyncio.ensure_future(decode.generate(asked))
    await anext(stream)
    stream.close()
    assert await asyncio.wait_for(running, 60) == Failed("aborted")


async def test_a_request_that_nobody_reads_is_ended_by_its_first_tokens(decode, inbox):
    unread = await asyncio.wait_for(decode.generate(call(prompt(17, 50), inbox, max_tokens=900)), 60)
    assert unread == Failed("aborted")


async def test_a_grammar_that_can_not_be_compiled_is_refused(decode):
    refused = await decode.generate(call(prompt(12, 50), grammar="start: nobody"))
    assert isinstance(refused, Failed) and refused.refused and "grammar" in refused.error


async def test_what_the_engine_refuses_is_refused_for_good(decode):
    refused = await decode.generate(call(prompt(13, 2000)))
    assert isinstance(refused, Failed) and refused.refused


async def test_a_gateway_out_of_reach_collects(decode, inbox, expected):
    ids = prompt(14, 40)
    await inbox.aclose()  # its address refuses connections from here on
    asked = call(ids, inbox, max_tokens=200)
    running = asyncio.ensure_future(decode.generate(asked))
    collected: list[int] = []
    while asked.id not in decode.requests:
        await asyncio.sleep(0)
    while not running.done() and len(collected) < 200:
        for item in (await decode.collect(CollectCall(asked.id, len(collected)))).items:
            collected += item.ids[len(collected) - item.offset :]
    result = await running
    assert isinstance(result, Generated)
    for item in result.undelivered:
        collected += item.ids[max(0, len(collected) - item.offset) :]
    assert collected == expected(ids, 200)
    assert (await decode.collect(CollectCall("nobody", 0))).items == ()


async def test_log_probabilities_and_what_was_cached_travel_apart(decode, inbox):
    asked = call(prompt(15, 70), inbox, logprobs=2, max_tokens=3)
    items, _ = await read_items(inbox, asked, lambda: decode.generate(asked))
    assert [item.cached for item in items] == [0] + [None] * (len(items) - 1)
    assert all(len(item.logprobs) == len(item.ids) and len(item.logprobs[0].top) == 2 for item in items if item.ids)


async def test_the_same_id_twice_is_a_fault(decode):
    asked = call(prompt(16, 50), prefill_above=1)
    await decode.generate(asked)
    with pytest.raises(ValueError, match="is here already"):
        await decode.generate(asked)
    await decode.abort(asked.id)


async def test_a_prompt_to_score_is_computed_here_whatever_is_stored_and_whoever_could_prefill_it(decode, inbox, pool):
    """Another worker's K/V tell nothing; what is in the pool already is not given to it again."""
    ids = list(range(400, 500))
    await read(inbox, plain := call(ids, inbox, max_tokens=2), lambda: decode.generate(plain))
    await decode._publisher.published(plain.id)
    before = len(pool.chunks)
    asked = call(ids, inbox, max_tokens=2, prompt_logprobs=1, prefill_above=1)
    tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
    assert len(tokens) == 2 and isinstance(result, Generated) and result.cached == 0
    assert result.path.computed == len(ids) and len(pool.chunks) == before
    told = result.prompt_logprobs
    assert told is not None and told.top == 1 and len(np.frombuffer(told.logprobs, np.float32)) == len(ids) - 1


async def test_128_answers_to_one_prompt_run_on_a_worker_with_fewer_slots(decode, inbox, expected):
    """`n: 128` as a gateway sends it: one call each, with one seed after another."""
    ids = prompt(9, 40)
    greedy, sampled = expected(ids, 3), [(n, {"temperature": 2.0, "seed": n}) for n in range(1, 128)]
    asked = [call(ids, inbox, max_tokens=3, **sampling) for _, sampling in [(0, {}), *sampled]]
    found = await asyncio.gather(*(read(inbox, one, lambda one=one: decode.generate(one)) for one in asked))
    assert [result.finish for _, result in found] == ["length"] * 128 and found[0][0] == greedy
    # Each draws for itself, and the prompt is computed once for those that come later.
    assert all(len(tokens) == 3 for tokens, _ in found) and len({tuple(tokens) for tokens, _ in found}) > 100
    assert max(result.cached for _, result in found) == 32
    again = call(ids, inbox, max_tokens=3, temperature=2.0, seed=77)
    assert (await read(inbox, again, lambda: decode.generate(again)))[0] == found[77][0]


async def test_of_a_batch_the_pool_gets_and_gives_no_less_than_a_chunk(decode, inbox, pool, expected):
    async def computes(length: int) -> None:
        ids = prompt(length, length)
        asked = replace(call(ids, inbox), priority="batch", share=0.05)
        tokens, result = await read(inbox, asked, lambda: decode.generate(asked))
        assert tokens == expected(ids, 16) and result.path.computed == length

    before = len(pool.chunks)
    await computes(200)
    await computes(300)
    # They leave in their order, and an answer does not wait for that.
    await until(lambda: len(pool.chunks) > before)
    assert len(pool.chunks) == before + 1


async def test_tokens_that_nobody_reads_before_the_end_come_together(decode, inbox, expected):
    ids = prompt(77, 40)
    asked = replace(call(ids, inbox, max_tokens=20, logprobs=1), together=8)
    items, result = await read_items(inbox, asked, lambda: decode.generate(asked))
    assert [len(item.ids) for item in items] == [1, 8, 8, 3]
    assert [token for item in items for token in item.ids] == expected(ids, 20)
    assert all(len(item.logprobs) == len(item.ids) for item in items) and items[0].cached == 0
    assert result.finish == items[-1].finish == "length"
