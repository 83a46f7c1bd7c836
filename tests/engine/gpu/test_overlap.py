"""Scheduling one step ahead changes no token, whatever happens to requests between two steps."""

from __future__ import annotations

import itertools
import random

import pytest

from serve_app.engine.gpu import overlap
from serve_app.engine.gpu.overlap import PLACEHOLDER, OverlapEngine, launch
from serve_app.engine.sharing import Sharing
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Draft
from serve_app.engine.speculation.speculate import Speculation
from tests import tiny
from tests.engine.fake import HistoryModel, make_engine
from tests.engine.fake import request as make_request
from tests.variants import some


def ahead(engine) -> OverlapEngine:
    return OverlapEngine(engine.runner, engine.scheduler, exporter=engine.exporter)


def run(engine, requests, arrivals: random.Random | None = None, aborts: dict[int, str] | None = None):
    """Tokens by request, in an engine that gets its requests over time and is told to abort some."""
    waiting, outputs, steps = list(requests), {}, 0
    while waiting or engine.has_work:
        for _ in range(len(waiting) if arrivals is None else arrivals.randrange(3)):
            if waiting:
                engine.add(waiting.pop(0))
        if aborts and steps in aborts:
            engine.abort(aborts[steps])
        for output in engine.step():
            got = outputs.setdefault(output.request_id, [])
            assert output.offset == len(got)
            got += output.token_ids
        steps += 1
        assert steps < 3000
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == 0
    return outputs


def requests(seed: int, count: int = 12, **sampling):
    rng = random.Random(seed)
    return [
        make_request(
            str(i), [rng.randrange(32) for _ in range(rng.randrange(1, 90))],
            max_tokens=rng.choice([1, 2, 20, 40]), temperature=rng.choice([0.0, 0.8]), seed=i,
            stop_token_ids=tuple(rng.sample(range(32), rng.randrange(3))), **sampling,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", some(range(6), 0))
@pytest.mark.parametrize("blocks", [60, 9], ids=["room", "preemption"])
@pytest.mark.parametrize("tenants", [1, 3])
def test_same_tokens_as_step_by_step(seed, blocks, tenants):
    options = {"num_blocks": blocks, "max_batch_tokens": 40, "max_num_seqs": 5}
    expected = run(make_engine(HistoryModel(), **options), requests(seed))
    engine = ahead(make_engine(HistoryModel(), **options))
    engine.scheduler.sharing = Sharing(itertools.count().__next__)
    asked = requests(seed)
    for number, request in enumerate(asked):
        # The first takes the places before the others come.
        request.tenant = bytes([max(0, number - len(asked) + tenants)])
    assert run(engine, asked, random.Random(seed)) == expected
    if blocks == 9:
        assert engine.scheduler.preemptions > 0
    for request in requests(seed):
        assert PLACEHOLDER not in request.tokens


class Foretold:
    """Knows the answers, but speaks only about every other request."""

    name, free, limit, continues = "foretold", True, 4, False

    def __init__(self, answers):
        self.answers = answers

    def propose(self, requests, count):
        spoken = [r for r in requests if int(r.id) % 2]
        return {r.id: Draft(self.answers[r.id][r.output_len :][:count]) for r in spoken}

    def forget(self, request_id):
        pass


@pytest.mark.parametrize("seed", some(range(4), 0))
@pytest.mark.parametrize("blocks", [60, 9], ids=["room", "preemption"])
def test_steps_run_ahead_where_there_are_no_drafts_and_step_by_step_where_they_pay(seed, blocks, monkeypatch):
    launched = []
    monkeypatch.setattr(overlap, "launch", lambda *about: launched.append(about) or launch(*about))
    options = {"num_blocks": blocks, "max_batch_tokens": 40, "max_num_seqs": 3}
    expected = run(make_engine(HistoryModel(), **options), requests(seed, 40))
    engine = ahead(make_engine(HistoryModel(), **options))
    engine.speculation = Speculation(Foretold(expected), SpeculationController(4))
    assert run(engine, requests(seed, 40), random.Random(seed)) == expected
    assert launched and engine.speculation.counters.lengths


def test_look_ups_that_find_nothing_do_not_keep_steps_from_running_ahead():
    engine = ahead(make_engine(HistoryModel(spread=3.0)))
    # A clock that goes on by one each time it is looked at: how long a step takes here says nothing.
    engine.speculation = Speculation(NgramProposer(), SpeculationController(4), clock=itertools.count(0.0).__next__)
    run(engine, [make_request("a", [1, 2, 3], max_tokens=900, temperature=1.0)])
    choices = engine.speculation.controller.choices
    assert choices["resting"] + choices["lost lately"] > 0.3 * sum(choices.values())


def test_a_step_is_in_flight_and_its_tokens_come_with_the_next_call():
    engine = ahead(make_engine(HistoryModel()))
    engine.add(make_request("a", [1, 2, 3], max_tokens=4, temperature=0.0))
    assert engine.step() == [] and engine.has_work
    assert [len(engine.step()) for _ in range(4)] == [1, 1, 1, 1]
    assert not engine.has_work


def test_nothing_is_computed_behind_the_last_token():
    """An end by length is foreseen; only an end by stop token costs a row."""
    engine = ahead(make_engine(HistoryModel()))
    run(engine, [make_request("a", [1, 2, 3], max_tokens=5, temperature=0.0)])
    assert engine.stats.steps == 5


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.7},
        {"logprobs": 2},
        {"logit_bias": {3: 2.0}},
    ],
)
def test_penalties_and_bias_run_ahead_and_log_probabilities_step_by_step(sampling):
    def mixed():
        return [*requests(1, 4), *(make_request(f"x{i}", [5, i], max_tokens=9, **sampling) for i in range(3))]

    expected = run(make_engine(HistoryModel()), mixed())
    assert run(ahead(make_engine(HistoryModel())), mixed(), random.Random(3)) == expected


@pytest.mark.parametrize("step", range(1, 7))
def test_aborting_between_two_steps(step):
    engine = ahead(make_engine(HistoryModel(), max_batch_tokens=40))
    whole = run(make_engine(HistoryModel(), max_batch_tokens=40), requests(2))
    cut = run(engine, requests(2), None, {step: "2"})
    assert {k: v for k, v in cut.items() if k != "2"} == {k: v for k, v in whole.items() if k != "2"}
    assert whole["2"][: len(cut.get("2", []))] == cut.get("2", [])


def test_a_failing_step_leaves_no_placeholder():
    from serve_app.engine.loop import EngineLoop

    engine = ahead(make_engine(HistoryModel()))
    original, calls, outputs = engine.runner.forward, [], []

    def fails_once(batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return original(batch)

    engine.runner.forward = fails_once
    request = make_request("a", [1, 2, 3], max_tokens=9)
    loop = EngineLoop(engine, outputs.extend)
    loop.add(request)
    again = make_request("b", [1, 2, 3], max_tokens=9)
    loop.call(lambda _: None).result(10)
    while not any(o.finish_reason for o in outputs):
        pass
    loop.add(again)
    while not any(o.finish_reason for o in outputs if o.request_id == "b"):
        pass
    loop.stop()
    failed = [o for o in outputs if o.request_id == "a"]
    assert failed[-1].error and failed[-1].offset == sum(len(o.token_ids) for o in failed)
    assert PLACEHOLDER not in request.tokens + again.tokens
    assert sum(len(o.token_ids) for o in outputs if o.request_id == "b") == 9


def test_the_same_chunks_are_exported():
    from serve_app.engine.kv_io.transfer import ChunkExporter

    published = []
    for wrap in (lambda engine: engine, ahead):
        chunks: list = []
        plain = make_engine(HistoryModel(), max_batch_tokens=100)
        plain.exporter = ChunkExporter(plain.runner.kv, lambda _, m, d, to=chunks: to.append((m, d().tobytes())))
        engine = wrap(plain)
        rng = random.Random(4)
        for i in range(3):
            prompt = [rng.randrange(32) for _ in range(300)]
            engine.add(make_request(str(i), prompt, max_tokens=60, prefill_only=i == 0), held=0)
        while engine.has_work:
            engine.step()
        published.append(sorted((m.start_token, m.n_tokens, m.chunk_id, d) for m, d in chunks))
    assert len(published[0]) >= 3 and published[0] == published[1]


@pytest.mark.parametrize("family", some(["llama", "gemma2"], "llama"))
def test_tokens_equal_generate(family, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    model, reference = tiny.load(path), tiny.load_reference(path)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 256) for _ in range(rng.randrange(1, 120))] for _ in range(8)]
    engine = ahead(tiny.make_engine(model, num_blocks=16, max_batch_tokens=50))
    tokens = run(engine, [tiny.make_request(str(i), p, max_tokens=24) for i, p in enumerate(prompts)])
    assert engine.scheduler.preemptions > 0
    for index, prompt in enumerate(prompts):
        assert tokens[str(index)] == tiny.reference_tokens(reference, prompt, 24)
