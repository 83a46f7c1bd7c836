"""The scheduler's promises, held against random traffic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.costs.steps import StepModel
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request, Status
from serve_app.engine.sharing import Sharing
from serve_app.engine.step import StepOutput
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import (
    Answer,
    HistoryModel,
    answer_alone,
    make_engine,
    random_prompt,
    staged,
    take,
)
from tests.tiny import ROOT

EOS = frozenset({3})
OTHER_ROOT = bytes(32)
# Of a step, see costs/steps.py: p0, p1, p2, d0, d1, d2, by a clock that goes on by one each time it is looked at.
COSTS = (1.0, 0.05, 0.0, 1.0, 0.1, 0.0)


@dataclass
class Arrival:
    at: int
    prompt: list[int]
    params: SamplingParams
    root: bytes
    abort_at: int | None
    prefill_only: bool
    share: float | None
    tenant: bytes
    weight: float


@dataclass
class Traffic:
    arrivals: list[Arrival]
    num_blocks: int
    options: dict
    draft_seed: int | None
    answers: dict[str, Answer] = field(default_factory=dict)


prompts = st.builds(
    # Few roots and long common parts, so that prefixes are shared at every length.
    lambda seed, length: random_prompt(seed, 200)[:length],
    st.integers(0, 2),
    st.integers(1, 130),
)
arrivals = st.builds(
    Arrival,
    at=st.integers(0, 25),
    prompt=prompts,
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 4]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 9),
        logprobs=st.sampled_from([None, 2]),
        stop_token_ids=st.sampled_from([(), (5,), (6, 7)]),
        ignore_eos=st.booleans(),
    ),
    root=st.sampled_from([ROOT, OTHER_ROOT]),
    abort_at=st.one_of(st.none(), st.none(), st.integers(0, 40)),
    prefill_only=st.sampled_from([False, False, False, True]),
    share=st.sampled_from([None, None, 0.05, 0.5]),
    tenant=st.sampled_from([b"a", b"a", b"b", b"c"]),
    weight=st.sampled_from([1.0, 1.0, 0.3, 2.0]),
)
traffic = st.builds(
    Traffic,
    st.lists(arrivals, min_size=1, max_size=9),
    num_blocks=st.integers(6, 24),
    options=st.fixed_dictionaries(
        {
            "max_batch_tokens": st.sampled_from([1, 3, 7, 32, 50, 200]),
            "max_num_seqs": st.integers(1, 8),
            "max_model_len": st.sampled_from([100, 4096]),
        }
    ),
    draft_seed=st.one_of(st.none(), st.integers(0, 99)),
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(traffic)
def test_everyone_gets_what_they_would_get_alone(case):
    model = HistoryModel()
    engine = make_engine(model, num_blocks=case.num_blocks, eos_token_ids=EOS, **case.options)
    play(case, model, engine, checked_step)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(traffic, st.integers(2, 4))
def test_everyone_gets_the_same_of_stages_that_work_at_the_same_time(case, depth):
    model = HistoryModel()
    engine = make_engine(model, num_blocks=case.num_blocks, eos_token_ids=EOS, **case.options)
    play(case, model, staged(engine, depth), unchecked_step)


def unchecked_step(engine: Engine) -> list[StepOutput]:
    outputs = engine.step()
    engine.scheduler.blocks.check()
    return outputs


def play(case: Traffic, model: HistoryModel, engine: Engine, step: Callable[[Engine], list[StepOutput]]) -> None:
    scheduler = engine.scheduler
    # Real-time requests are near for some steps, and accounts have their turns after a few. Steps cost as much of
    # that time as they take.
    scheduler.sharing = Sharing(count().__next__)
    scheduler.sharing.costs = StepModel(COSTS)
    drafts = random.Random(case.draft_seed)
    refused, aborted = set(), set()
    for now in range(6000):
        for index, arrival in enumerate(case.arrivals):
            name = str(index)
            if arrival.at == now:
                new = Request(name, list(arrival.prompt), len(arrival.prompt), arrival.params, arrival.root)
                new.prefill_only, new.share = arrival.prefill_only, arrival.share
                new.tenant, new.weight = arrival.tenant, arrival.weight
                if len(arrival.prompt) >= scheduler.max_model_len:
                    with pytest.raises(ValueError, match="context"):
                        engine.add(new)
                    refused.add(name)
                else:
                    engine.add(new)
            if arrival.abort_at == now and engine.abort(name):
                aborted.add(name)
        if now > 45 and not engine.has_work:
            break
        if case.draft_seed is not None:
            put_drafts(scheduler.drafted_for, drafts)
        take(step(engine), case.answers)
    assert not engine.has_work
    assert scheduler.blocks.used_blocks == 0

    for index, arrival in enumerate(case.arrivals):
        name = str(index)
        if name in refused:
            continue
        answer = case.answers.get(name, Answer([], "", None))
        if arrival.prefill_only:
            alone = Answer([], "stop", None)
        else:
            alone = answer_alone(model, arrival.prompt, arrival.params, eos=EOS, context=scheduler.max_model_len)
        if name in aborted:
            assert answer.finish_reason == ""
            assert answer.tokens == alone.tokens[: len(answer.tokens)]
        else:
            assert answer == alone


def put_drafts(running: list[Request], rng: random.Random) -> None:
    """Drafts of random length and quality on what is ready to take some."""
    for candidate in running:
        if candidate.pending == 1 and not candidate.prefill_only and not candidate.held:
            room = candidate.sampling.max_tokens - candidate.output_len - 1
            candidate.draft = [rng.randrange(32) for _ in range(min(room, rng.randrange(5)))]


def checked_step(engine: Engine) -> list[StepOutput]:
    """One engine step with the promises that hold in every step."""
    scheduler = engine.scheduler
    generating = [r for r in scheduler.running if r.pending == 1 + len(r.draft) and not r.prefill_only]
    arrived = list(scheduler.running)
    step = scheduler.next()
    scheduler.blocks.check()
    assert step.tokens <= scheduler.max_batch_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert all(s.count > 0 for s in step.scheduled)
    # Whoever generates has a row in every step, unless it had to give its blocks to someone who came before; batch
    # requests do, too, where there are no others.
    scheduled = [s.request for s in step.scheduled]
    preempted = [r for r in arrived if r.status is Status.WAITING]
    for candidate in generating:
        assert candidate in scheduled or candidate in preempted or candidate.batch
    # Batch requests are behind the others, and give way to them first.
    for requests in (scheduler.running, list(scheduler.waiting)):
        assert [r.batch for r in requests] == sorted(r.batch for r in requests)
    # Unless it is another account's turn, the latest of an account go first, and they are its next to be let in again,
    # in their old order.
    if not any(r.paused for r in preempted):
        for account in {(r.tenant, r.batch) for r in preempted}:
            again, had, waits = (
                [r for r in requests if (r.tenant, r.batch) == account]
                for requests in (preempted, arrived, scheduler.waiting)
            )
            assert again == had[len(had) - len(again) :] == waits[: len(again)]
    if not step.scheduled:
        assert not scheduler.has_work, "nothing goes on"
        return []
    outputs = scheduler.commit(step, engine.runner.run(step))
    scheduler.blocks.check()
    return outputs
