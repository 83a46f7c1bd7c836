"""The scheduler's promises, one by one."""

from __future__ import annotations

import pytest

from serve_app.costs.pace import Pace
from serve_app.engine.drafts import accept
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request, Status
from serve_app.engine.step import Step
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import (
    Answer,
    HistoryModel,
    answer_alone,
    collect,
    make_engine,
    random_prompt,
    request,
    take,
)
from tests.engine.test_random_traffic import OTHER_ROOT, checked_step
from tests.tiny import ROOT


def scheduled_counts(step: Step) -> dict[str, int]:
    return {s.request.id: s.count for s in step.scheduled}


def run_step(engine: Engine) -> Step:
    step = engine.scheduler.next()
    engine.scheduler.commit(step, engine.runner.run(step))
    return step


def test_a_long_prompt_delays_nobodys_next_token():
    engine = make_engine(HistoryModel(), max_batch_tokens=16)
    for name in "ab":
        engine.add(request(name, [1, 2, 3], max_tokens=60))
    run_step(engine)
    engine.add(request("long", random_prompt(0, 500), max_tokens=1))
    for _ in range(30):
        assert scheduled_counts(run_step(engine)) == {"a": 1, "b": 1, "long": 14}


def test_beside_texts_a_step_takes_half_of_a_prompt_while_gaps_are_too_long():
    engine = make_engine(HistoryModel(), max_batch_tokens=16, max_num_seqs=4)
    engine.scheduler.pace = Pace(1e-9)  # no step is short enough
    prompt = random_prompt(0, 80)
    engine.add(request("long", prompt, max_tokens=1))
    assert [s.count for s in run_step(engine).scheduled] == [16]  # nobody waits for a token
    collect(engine)
    engine.add(request("a", [1, 2, 3], max_tokens=60))
    for _ in range(3):
        engine.step()
    engine.add(request("long", prompt, max_tokens=1))
    assert scheduled_counts(run_step(engine)) == {"a": 1, "long": 7}


def test_first_tokens_of_prompts_are_no_tokens_of_the_texts_beside_them(monkeypatch):
    engine = make_engine(HistoryModel(), max_batch_tokens=64, max_num_seqs=32)
    told = []
    engine.scheduler.pace = Pace(1.0)
    monkeypatch.setattr(engine.scheduler.pace, "took", lambda seconds, generated, **more: told.append(generated))
    engine.add(request("a", [1, 2, 3], max_tokens=60))
    engine.step()
    for n in range(12):
        engine.add(request(f"short {n}", [1, n], max_tokens=1))
    engine.step()
    assert told == [0.0, 1.0]
    # Nobody waits for the tokens of a batch.
    engine.abort("a")
    engine.add(Request("batch", [1, 2], 2, request("b", [1], max_tokens=9).sampling, ROOT, share=0.05))
    engine.step()
    engine.step()
    assert told[2:] == [0.0, 0.0]


def test_waiting_requests_come_in_order_of_arrival():
    engine = make_engine(HistoryModel(), num_blocks=5, max_num_seqs=8)
    engine.add(request("first", random_prompt(0, 90)))
    engine.add(request("second", random_prompt(1, 60)))
    engine.add(request("small", [1]))
    # The second does not fit beside the first, and the small one, which would, does not overtake it.
    admitted: list[str] = []
    while engine.has_work:
        admitted += [name for name in scheduled_counts(run_step(engine)) if name not in admitted]
        assert "first" not in [r.id for r in engine.scheduler.running] or admitted == ["first"]
    assert admitted == ["first", "second", "small"]


def test_preemption_takes_the_latest_and_loses_nothing():
    model = HistoryModel()
    engine = make_engine(model, num_blocks=7)
    for name in "abc":
        engine.add(request(name, random_prompt(ord(name), 60), max_tokens=40))
    victims, answers = [], {}
    while engine.has_work:
        before = list(engine.scheduler.running)
        take(checked_step(engine), answers)
        victims += [r.id for r in before if r.status is Status.WAITING]
    assert victims and set(victims) <= {"b", "c"} and victims[0] == "c"
    for name in "abc":
        params = SamplingParams(temperature=0.0, max_tokens=40)
        assert answers[name] == answer_alone(model, random_prompt(ord(name), 60), params)


def test_max_num_seqs():
    engine = make_engine(HistoryModel(), max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, [1], max_tokens=3))
    assert set(scheduled_counts(run_step(engine))) == {"a", "b"}


# Drafts


def test_drafts_leave_every_request_its_token():
    engine = make_engine(HistoryModel(), max_batch_tokens=6)
    requests = [request(name, [ord(name)], max_tokens=30) for name in "abcd"]
    for one in requests:
        engine.add(one)
    run_step(engine)
    for _ in range(5):
        for one in requests:
            one.draft = [0, 0, 0, 0]
        counts = scheduled_counts(run_step(engine))
        assert counts == {"a": 3, "b": 1, "c": 1, "d": 1}


def test_drafts_take_no_block_that_a_later_request_needs():
    engine = make_engine(HistoryModel(), num_blocks=4)
    first, second = request("a", random_prompt(0, 30), max_tokens=20), request("b", random_prompt(1, 32), max_tokens=20)
    engine.add(first)
    engine.add(second)
    run_step(engine)
    # One block is free. The drafts of the first would reach into it; the second cannot go on without it.
    first.draft = [0, 0, 0, 0]
    step = run_step(engine)
    assert step.preempted == 0 and scheduled_counts(step) == {"a": 1, "b": 1}


def test_accept():
    assert accept([], [7]) == 0
    assert accept([7, 8], [7, 8, 9]) == 2
    assert accept([7, 8], [7, 5, 8]) == 1
    assert accept([7, 8], [5, 8, 9]) == 0


# Prefix cache


def test_a_prefix_is_shared_within_a_root_and_never_beyond():
    model = HistoryModel()
    engine = make_engine(model)
    prompt = random_prompt(0, 100)
    alone = answer_alone(model, prompt, SamplingParams(temperature=0.0, max_tokens=8))
    cached = []
    for name, root in (("a", ROOT), ("b", OTHER_ROOT), ("c", ROOT), ("d", OTHER_ROOT)):
        one = request(name, prompt, root=root)
        engine.add(one)
        assert collect(engine)[name] == alone
        cached.append(one.cached)
    assert cached == [0, 0, 96, 96]


@pytest.mark.parametrize(("length", "hit"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (96, 64)])
def test_cached_counts_whole_blocks_and_never_the_last_token(length, hit):
    engine = make_engine(HistoryModel())
    outputs = []
    for name in "ab":
        engine.add(request(name, random_prompt(0, length), max_tokens=1))
        outputs += engine.step()
    assert [o.cached for o in outputs] == [0, hit]
    assert engine.stats.cached_tokens == hit
    assert engine.stats.prompt_tokens == 2 * length - hit
    assert engine.stats.generated_tokens == engine.stats.finished == 2


def test_output_is_reused_as_the_next_turns_prompt():
    engine = make_engine(HistoryModel())
    engine.add(request("turn1", random_prompt(0, 40), max_tokens=60))
    answer = collect(engine)["turn1"].tokens
    second = request("turn2", random_prompt(0, 40) + answer + [1, 2, 3])
    engine.add(second)
    collect(engine)
    assert second.cached == 96


def test_requests_that_share_a_prefix_share_its_blocks():
    engine = make_engine(HistoryModel(), num_blocks=20)
    prompt = random_prompt(0, 320)
    engine.add(request("a", prompt, max_tokens=50))
    run_step(engine)
    for name in "bcd":
        engine.add(request(name, prompt, max_tokens=3))
    assert scheduled_counts(run_step(engine)) == {"a": 1, "b": 32, "c": 32, "d": 32}
    assert engine.scheduler.blocks.used_blocks == 11 + 3


def test_preempted_requests_do_not_call_their_own_blocks_a_cache_hit():
    engine = make_engine(HistoryModel(), num_blocks=6)
    requests = [request(name, random_prompt(ord(name), 60), max_tokens=50) for name in "ab"]
    for one in requests:
        engine.add(one)
    collect(engine)
    assert requests[1].preemptions > 0
    assert [r.cached for r in requests] == [0, 0]


# Ends


def test_finish_reasons():
    model = HistoryModel()
    free = answer_alone(model, [1, 2], SamplingParams(temperature=0.0, max_tokens=30)).tokens
    third = free[2]
    assert third not in free[:2]
    engine = make_engine(model, eos_token_ids=frozenset({third}))
    engine.add(request("eos", [1, 2], max_tokens=30))
    engine.add(request("ignored", [1, 2], max_tokens=30, ignore_eos=True))
    engine.add(request("stop id", [1, 2], max_tokens=30, ignore_eos=True, stop_token_ids=(third,)))
    engine.add(request("length", [1, 2], max_tokens=2))
    # Both at once: the model did stop.
    engine.add(request("both", [1, 2], max_tokens=3))
    ends = {name: (a.tokens, a.finish_reason) for name, a in collect(engine).items()}
    assert ends == {
        "eos": (free[:3], "stop"),
        "ignored": (free, "length"),
        "stop id": (free[:3], "stop"),
        "length": (free[:2], "length"),
        "both": (free[:3], "stop"),
    }


@pytest.mark.parametrize("draft", [[], [0, 1], None], ids=["no-draft", "wrong-draft", "right-draft"])
def test_the_context_is_filled_to_the_last_token(draft):
    model = HistoryModel()
    prompt = random_prompt(0, 44)
    alone = answer_alone(model, prompt, SamplingParams(temperature=0.0, max_tokens=99), context=50)
    engine = make_engine(model, max_model_len=50)
    one = request("x", prompt, max_tokens=99)
    engine.add(one)
    answers: dict[str, Answer] = {}
    while engine.has_work:
        if one.pending == 1:
            one.draft = list(alone.tokens[one.output_len :] if draft is None else draft)[: 50 - len(one.tokens) - 1]
        take(engine.step(), answers)
    assert answers["x"] == alone
    assert len(alone.tokens) == 6 and alone.finish_reason == "length"


def test_what_does_not_fit_is_refused():
    engine = make_engine(HistoryModel(), num_blocks=4, max_model_len=4096)
    assert engine.scheduler.max_model_len == 96
    with pytest.raises(ValueError, match="96"):
        engine.add(request("x", [1] * 96))
    with pytest.raises(ValueError, match="one token"):
        engine.add(request("x", []))
    assert not engine.has_work
    engine.add(request("x", [1] * 95, max_tokens=9))
    assert len(collect(engine)["x"].tokens) == 1


def test_a_request_goes_on_where_another_engine_stopped():
    model = HistoryModel()
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.5}
    alone = answer_alone(model, [1, 2, 3], SamplingParams(**params)).tokens
    engine = make_engine(model)
    resumed = Request("x", [1, 2, 3, *alone[:7]], 3, SamplingParams(**params), ROOT, resumed=7)
    engine.add(resumed)
    outputs = [o for _ in range(13) for o in engine.step()]
    assert [o.offset for o in outputs] == list(range(7, 20))
    assert [t for o in outputs for t in o.token_ids] == alone[7:]
    assert not engine.has_work


def test_abort_frees_blocks_at_once_wherever_the_request_is():
    engine = make_engine(HistoryModel(), num_blocks=5, max_batch_tokens=20)
    engine.add(request("running", random_prompt(0, 90), max_tokens=20))
    engine.add(request("waiting", random_prompt(1, 90)))
    run_step(engine)
    assert engine.abort("waiting") and engine.abort("running")
    assert not engine.abort("running")
    assert engine.scheduler.blocks.used_blocks == 0 and not engine.has_work
    engine.scheduler.blocks.check()
