"""What a worker reports is what routing takes it to be."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from serve_app.channel.sender import TokenSender
from serve_app.channel.served import gateway_name
from serve_app.engine.request import Request
from serve_app.sampling_params import SamplingParams
from serve_app.wire.address import InboxAddress
from serve_app.wire.load import KEY_BYTES, MAX_EVICTED, Batch, Fetch
from serve_app.wire.replicas import Listen
from serve_app.worker.load_report import EngineLoad
from tests.engine.fake import HistoryModel, make_engine, request
from tests.tiny import ROOT


async def test_prompts_computed_for_others_are_work_but_no_streams() -> None:
    """As streams they would make a prefill worker look slower than it is, and a decode worker fuller."""
    engine = make_engine(HistoryModel(), max_num_seqs=4, max_batch_tokens=64, max_model_len=512)
    sender = TokenSender("w")
    load = EngineLoad("m", "decode", "n1", engine, sender, deque())
    prompt = np.arange(100) % 30
    for number in range(6):
        sampling = SamplingParams(max_tokens=8, temperature=0)
        engine.add(Request(f"r{number}", prompt.tolist(), 100, sampling, ROOT, prefill_only=number % 2 == 0))
    before, steps = load._measure(), 0
    assert (before.running, before.waiting, before.queued_tokens > 500) == (0, 3, True)
    while engine.has_work:
        engine.step()
        now = load._measure()
        streams = [r for r in (*engine.scheduler.running, *engine.scheduler.waiting) if not r.prefill_only]
        assert now.running + now.waiting == len(streams)
        assert now.running <= 4
        steps += len(now.steps)
    after = load._measure()
    assert (after.running, after.waiting, after.queued_tokens) == (0, 0, 0) and steps > 6
    await sender.aclose()


async def test_what_batch_requests_have_is_told_apart() -> None:
    engine = make_engine(HistoryModel(), max_num_seqs=2, num_blocks=40, max_batch_tokens=256)
    sender = TokenSender("w")
    load = EngineLoad("m", "decode", "n1", engine, sender, deque())
    shared = (np.arange(100) % 30).tolist()

    def add(name: str, share: float | None) -> None:
        sampling = SamplingParams(max_tokens=30, temperature=0)
        prompt = shared if name in ("b0", "r") else [len(name), *name.encode(), *shared[3:]]
        engine.add(Request(name, [token % 30 for token in prompt], 100, sampling, ROOT, share=share))

    assert load._measure().batch == Batch()
    add("b0", 0.05)
    add("b1", 0.05)
    add("b2", 0.05)
    assert load._measure().batch == Batch(3 * 99, 0, 3, 0)
    engine.step()
    now = load._measure()
    assert now.batch == Batch(99, 2, 1, now.used_blocks) and now.used_blocks > 0
    add("r", None)
    engine.step()
    now = load._measure()
    # Three blocks of the prompt are shared with a request that is none.
    [real] = [r for r in engine.scheduler.running if not r.batch]
    assert (now.running, now.waiting, now.batch.running, now.batch.waiting) == (2, 2, 1, 2)
    assert now.batch.used_blocks == now.used_blocks - len(real.blocks)
    await sender.aclose()


async def test_a_gateway_that_has_batches_alone_plans_nothing() -> None:
    sender = TokenSender("w")
    load = EngineLoad("m", "decode", "n1", make_engine(HistoryModel()), sender, deque())
    runner, gateway = InboxAddress("127.0.0.1", 1, b"s" * 16), InboxAddress("127.0.0.1", 2, b"s" * 16)
    load.subscribe(Listen(runner, 60.0, "r", "decode", None, plans=False))
    assert (load._measure().planner, load._measure().gateways, load._measure().role) == ("", 0, "decode")
    load.subscribe(Listen(gateway, 60.0, "r", "decode", "mixed"))
    load.subscribe(Listen(runner, 60.0, "r", "decode", None, plans=False))
    now = load._measure()
    assert (now.planner, now.gateways, now.role) == (gateway_name(gateway), 1, "mixed")
    load.close()
    await sender.aclose()


async def test_one_of_the_gateways_owns_a_model_and_another_may_own_the_next() -> None:
    sender = TokenSender("w")
    inboxes = [InboxAddress("127.0.0.1", port, b"s" * 16) for port in range(1, 9)]
    owners = {}
    for model in ("m1", "m2", "m3", "m4"):
        for order in (inboxes, inboxes[::-1]):
            load = EngineLoad(model, "decode", "n1", make_engine(HistoryModel()), sender, deque())
            for inbox in order:
                load.subscribe(Listen(inbox, 60.0, "r", "decode", None))
            told = load._measure()
            assert told.owner in inboxes and told.planner == gateway_name(told.owner)
            # Every worker of a model names the same, whoever came first.
            assert owners.setdefault(model, told.owner) == told.owner
            load.close()
    assert len(set(owners.values())) > 1
    await sender.aclose()


async def test_a_gateway_that_comes_later_takes_no_model_away() -> None:
    sender, now = TokenSender("w"), int(time.time() // 60)
    old, late = ([InboxAddress("127.0.0.1", port, b"s" * 16) for port in ports] for ports in ((1, 2), range(3, 20)))
    for model in ("m1", "m2", "m3", "m4"):
        load = EngineLoad(model, "decode", "n1", make_engine(HistoryModel()), sender, deque())
        for inbox in old:
            load.subscribe(Listen(inbox, 60.0, "r", "decode", None, since=now - 2))
        owner = load._measure().owner
        for inbox in late:
            load.subscribe(Listen(inbox, 60.0, "r", "decode", None, since=now - 1))
        assert load._measure().owner == owner
        # Nor does a worker that hears of the later ones first follow another.
        other = EngineLoad(model, "decode", "n1", make_engine(HistoryModel()), sender, deque())
        for inbox, since in ((late[0], now - 1), (old[1], now - 2), (old[0], now - 2)):
            other.subscribe(Listen(inbox, 60.0, "r", "decode", None, since=since))
        assert other._measure().owner == owner
        for one in (load, other):
            one.close()
    await sender.aclose()


async def test_gateways_that_have_been_there_for_long_share_the_models_again() -> None:
    sender, now = TokenSender("w"), int(time.time() // 60)
    inboxes = [InboxAddress("127.0.0.1", port, b"s" * 16) for port in range(1, 5)]
    owners = set()
    for model in map(str, range(20)):
        load = EngineLoad(model, "decode", "n1", make_engine(HistoryModel()), sender, deque())
        for number, inbox in enumerate(inboxes):
            load.subscribe(Listen(inbox, 60.0, "r", "decode", None, since=now - 100 + number))
        owners.add(load._measure().owner)
        load.close()
    assert owners == set(inboxes)
    await sender.aclose()


async def test_keys_that_the_cache_has_let_go_are_told_until_a_report_is_sent() -> None:
    engine, sender = make_engine(HistoryModel(), num_blocks=9), TokenSender("w")
    load = EngineLoad("m", "decode", "n1", engine, sender, deque(), weights=b"weights")
    blocks = engine.scheduler.blocks
    names = [bytes([n]) * 32 for n in range(8)]
    for block, name in zip(blocks.allocate(8), names, strict=True):
        blocks.seal(block, name)
        blocks.release([block])
    again = blocks.allocate(3)
    for _ in range(2):
        assert load._measure().evicted == b"".join(name[:KEY_BYTES] for name in names[:3])
    # One that it holds again is not gone.
    blocks.seal(again[0], names[1])
    assert load._measure().evicted == names[0][:KEY_BYTES] + names[2][:KEY_BYTES]
    load._told()
    assert (load._measure().evicted, load._measure().weights) == (b"", b"weights")
    # More than fit go along with later reports.
    blocks.evicted.extend(n.to_bytes(32, "big") for n in range(MAX_EVICTED + 5))
    lengths = []
    for _ in range(3):
        lengths.append(len(load._measure().evicted) // KEY_BYTES)
        load._told()
    assert lengths == [MAX_EVICTED, 5, 0]
    await sender.aclose()


async def test_a_worker_says_that_its_replica_leaves() -> None:
    sender = TokenSender("w")
    load = EngineLoad("m", "decode", "n1", make_engine(HistoryModel()), sender, deque())
    gateways = [InboxAddress("127.0.0.1", port, b"s" * 16) for port in (1, 2)]
    load.subscribe(Listen(gateways[0], 60.0, "r", "decode", None))
    assert not load._measure().leaving
    load.subscribe(Listen(gateways[0], 60.0, "r", "decode", None, leaving=True))
    # For good, whatever another gateway's renewal says that was on its way.
    load.subscribe(Listen(gateways[1], 60.0, "r", "decode", None))
    assert load._measure().leaving
    load.close()
    await sender.aclose()


async def test_what_was_measured_is_told_even_if_a_report_was_not_worth_sending() -> None:
    engine, sender, fetches = make_engine(HistoryModel()), TokenSender("w"), deque[Fetch]()
    load = EngineLoad("m", "decode", "n1", engine, sender, fetches)
    fetches.append(Fetch("node", 1000, 0.01))
    engine.add(request("a", [1, 2, 3]))
    engine.step()
    first = load._measure()
    assert first.fetches == (Fetch("node", 1000, 0.01),) and len(first.steps) == 1
    # The reporter looked and sent nothing.
    again = load._measure()
    assert (again.fetches, again.steps) == (first.fetches, first.steps)
    fetches.append(Fetch("disk", 500, 0.02))
    assert load._measure().fetches == (*first.fetches, Fetch("disk", 500, 0.02))
    load._told()
    assert (load._measure().fetches, load._measure().steps) == ((), ())
    await sender.aclose()
