"""Stages that work at the same time change no token, whatever happens to requests whose steps are under way."""

from __future__ import annotations

import itertools
import random

import pytest

from serve_app.costs.stages import LEAST_ROWS, LEAST_TOKENS
from serve_app.engine.sharing import Sharing
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.speculate import Speculation
from tests.engine.fake import HistoryModel, make_engine, staged
from tests.engine.fake import request as make_request
from tests.engine.gpu.test_overlap import Foretold, requests, run
from tests.variants import some

OPTIONS = {"max_batch_tokens": 40, "max_num_seqs": 12}


@pytest.mark.parametrize("seed", some(range(6), 0))
@pytest.mark.parametrize("blocks", [60, 6], ids=["room", "preemption"])
@pytest.mark.parametrize(("depth", "tenants"), [(2, 1), (2, 3), (4, 1), (4, 3)])
def test_same_tokens_as_step_by_step(seed, blocks, depth, tenants):
    expected = run(make_engine(HistoryModel(), num_blocks=blocks, **OPTIONS), requests(seed))
    engine = staged(make_engine(HistoryModel(), num_blocks=blocks, **OPTIONS), depth)
    engine.scheduler.sharing = Sharing(itertools.count().__next__)
    asked = requests(seed)
    for number, request in enumerate(asked):
        request.tenant = bytes([max(0, number - len(asked) + tenants)])
    assert run(engine, asked, random.Random(seed)) == expected
    if blocks == 6 and depth == 2:
        assert engine.scheduler.preemptions > 0
    assert engine.stats.under_way > 1.3 * engine.stats.steps


@pytest.mark.parametrize("seed", some(range(4), 0))
@pytest.mark.parametrize("blocks", [60, 6], ids=["room", "preemption"])
@pytest.mark.parametrize("controller", [VerifyEverything, SpeculationController])
def test_drafts_are_verified_while_other_steps_are_under_way(seed, blocks, controller):
    expected = run(make_engine(HistoryModel(), num_blocks=blocks, **OPTIONS), requests(seed, 40))
    engine = staged(make_engine(HistoryModel(), num_blocks=blocks, **OPTIONS), 2)
    engine.speculation = Speculation(Foretold(expected), controller(4))
    assert run(engine, requests(seed, 40), random.Random(seed)) == expected
    assert engine.speculation.counters.lengths
    assert engine.stats.under_way > 1.3 * engine.stats.steps


def test_plain_steps_are_measured_though_groups_differ_in_size():
    engine = staged(make_engine(HistoryModel(spread=3.0), max_num_seqs=16), 2)
    # A clock that goes on by one each time it is looked at: how long a step takes here says nothing.
    clock = itertools.count(0.0).__next__
    engine.speculation = Speculation(NgramProposer(), SpeculationController(4), clock=clock)
    asked = [make_request(str(i), [i + 1, 2], max_tokens=60, temperature=1.0) for i in range(11)]
    run(engine, asked)
    costs = engine.speculation.controller.costs
    assert costs.plain(6) is not None and costs.plain(5) is not None


@pytest.mark.parametrize("seed", some(range(4), 1))
def test_requests_leave_while_their_steps_are_under_way(seed):
    rng = random.Random(seed)
    aborts = {rng.randrange(30): str(name) for name in rng.sample(range(12), 5)}
    whole = run(make_engine(HistoryModel(), **OPTIONS), requests(seed))
    found = run(staged(make_engine(HistoryModel(), **OPTIONS), 3), requests(seed), random.Random(seed), aborts)
    for name, tokens in found.items():
        assert tokens == whole[name][: len(tokens)]
        assert name in aborts.values() or tokens == whole[name]


def test_generating_requests_are_divided_among_steps():
    engine = staged(make_engine(HistoryModel(), num_blocks=100), 2)
    for index in range(4 * LEAST_ROWS):
        engine.add(make_request(str(index), [index, 1], max_tokens=20))
    rows = []
    while engine.has_work:
        rows.append(len(engine.step()))
    # All prompts are one step; what follows is two groups that take turns.
    assert rows[0] == 4 * LEAST_ROWS and set(rows[1:]) == {2 * LEAST_ROWS}
    assert len(rows) == 1 + 2 * 19
    engine.scheduler.blocks.check()


def test_few_requests_stay_together():
    engine = staged(make_engine(HistoryModel()), 2)
    for index in range(LEAST_ROWS):
        engine.add(make_request(str(index), [index, 1], max_tokens=20))
    run(engine, [])
    assert engine.stats.steps == engine.stats.under_way == 20


def test_pieces_of_a_prompt_follow_one_another():
    """None waits until the one before it is done; what is generated waits for the last."""
    plain = make_engine(HistoryModel(), num_blocks=100, max_batch_tokens=2048)
    prompt = [i % 32 for i in range(5 * LEAST_TOKENS)]
    expected = run(plain, [make_request("a", prompt)])
    engine = staged(make_engine(HistoryModel(), num_blocks=100, max_batch_tokens=4 * LEAST_TOKENS), 2)
    engine.add(make_request("a", prompt))
    assert engine.step() == [] and [flight.step.tokens for flight in engine._flights] == [LEAST_TOKENS]
    assert engine.step() == []
    assert run(engine, []) == expected
    assert engine.stats.under_way == 4 * 2 + 1 + 7


def test_log_probabilities_of_a_prompt_are_told_in_order():
    prompt = [i % 32 for i in range(200)]
    told = []
    for engine in (make_engine(HistoryModel(), **OPTIONS), staged(make_engine(HistoryModel(), **OPTIONS), 3)):
        engine.add(make_request("a", prompt, prompt_logprobs=2, max_tokens=3))
        last = None
        while engine.has_work:
            for output in engine.step():
                last = output
        told.append(last.prompt_logprobs)
    assert told[0] is not None and told[0] == told[1]


def test_steps_under_way_are_forgotten_where_one_fails():
    engine = staged(make_engine(HistoryModel(), **OPTIONS), 3)
    for request in requests(0):
        engine.add(request)
    for _ in range(4):
        engine.step()
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        assert engine.abort(request.id, export=False)
    assert not engine.has_work
    engine.scheduler.forget_cache()
    expected = run(make_engine(HistoryModel(), **OPTIONS), requests(1))
    assert run(engine, requests(1)) == expected
