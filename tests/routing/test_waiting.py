"""Requests that wait for a worker, and when one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.absence import FIRST_GUESS_S, SILENCE_S
from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.dispatch import Dispatch, DispatchConfig, Effects
from serve_app.routing.types import WorkerLoad
from tests.routing.world import ROUTER, assert_empty, request, world


def reported(dispatch: Dispatch, now: float) -> Effects:
    return dispatch.report("p", WorkerLoad("w0", "n0", kv_blocks_total=1000, max_seqs=4, reported_at=now), now)


def refusals(effects: Effects) -> dict[str, float]:
    return {t.request_id: t.refusal.retry_after for t in effects.turns if t.refusal is not None}


def asking(**config) -> Dispatch:
    dispatch = Dispatch(DispatchConfig(slots=4, router=ROUTER, **config))
    dispatch.absence.asked = True
    return dispatch


def test_requests_wait_for_the_first_report_in_the_queue() -> None:
    """Whoever can't wait is looked at when it comes, and refused when none has come for some seconds."""
    dispatch = asking()
    for name, asked in (("a", {}), ("b", {"reject_if_busy": True}), ("c", {"deadline": 60.0})):
        assert dispatch.arrive(request(name, **asked), 0.0).turns == []
    assert len(dispatch.queue) == 3
    assert [t.decision is not None for t in reported(dispatch, 0.5).turns] == [True] * 3
    late = asking()
    for name in "ab":
        late.arrive(request(name, reject_if_busy=name == "b"), 0.0)
    assert late.tick(SILENCE_S).turns == []
    assert refusals(late.tick(SILENCE_S + 0.3)) == {"b": pytest.approx(FIRST_GUESS_S, abs=4)}
    assert len(late.queue) == 1


def test_requests_wait_in_the_queue_while_a_worker_is_replaced() -> None:
    """It is fair, and sees who can't wait: by how long the last replacement took."""
    dispatch = asking()
    reported(dispatch, 0.0)
    for began, takes in ((10.0, 4.0), (20.0, 4.0)):
        dispatch.lost("p", began)
        assert dispatch.arrive(request(f"{began}"), began).turns == []
        busy = dispatch.arrive(request(f"{began} hasty", reject_if_busy=True), began)
        assert refusals(busy) == {f"{began} hasty": FIRST_GUESS_S if began == 10.0 else 4.0}
        soon = dispatch.arrive(request(f"{began} soon", deadline=began + 2.0), began + 0.1)
        assert list(refusals(soon)) == [f"{began} soon"]
        assert [t.request_id for t in reported(dispatch, began + takes).turns] == [f"{began}"]
        dispatch.finish(f"{began}", began + takes)
    assert dispatch.counters.unrouted == 0 and not len(dispatch)


def test_a_deadline_that_comes_while_no_worker_does_is_refused_wherever_it_stands() -> None:
    dispatch = asking()
    reported(dispatch, 0.0)
    dispatch.lost("p", 1.0)
    for number in range(40):
        dispatch.arrive(request(str(number)), 1.0)
    assert dispatch.arrive(request("hasty", deadline=15.0), 1.0).turns == []
    told = {}
    for step in range(100):
        told |= dict.fromkeys(refusals(dispatch.tick(now := 1.0 + step * 0.2)), now)
    assert list(told) == ["hasty"] and told["hasty"] <= 15.0
    assert len(dispatch.queue) == 40


def test_requests_go_unchosen_where_a_worker_cannot_report() -> None:
    """Its replica has told it where, and nothing comes: so the channel is closed, and calls are the only way."""
    dispatch = asking()
    dispatch.absence.told(True, 0.0)
    dispatch.arrive(request("a"), 0.5)
    assert dispatch.tick(SILENCE_S).turns == []
    assert [t.request_id for t in dispatch.tick(SILENCE_S + 0.1).turns] == ["a"]
    dispatch.arrive(request("b"), 4.0)
    assert dispatch.counters.unrouted == 2
    # One that is being replaced does not listen: then requests wait again.
    dispatch.absence.told(False, 5.0)
    assert dispatch.arrive(request("c"), 5.0).turns == []


def test_a_model_at_zero_is_started_by_one_request_and_the_others_wait() -> None:
    dispatch = asking(scales_to_zero=True)
    went = [len(dispatch.arrive(request(str(n)), 0.0).turns) for n in range(3)]
    assert went == [1, 0, 0]
    assert [t.request_id for t in dispatch.finish("0", 1.0).turns] == ["1"]  # its client left
    assert [t.request_id for t in reported(dispatch, 6.0).turns] == ["2"]


@given(st.integers(0, 200_000), st.integers(1, 20_000), st.integers(0, 12), st.floats(0.05, 20.0), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_refusal_means_that_the_first_token_is_predicted_late(queued, prompt, ahead, limit, own) -> None:
    """``own``: the limit is the request's deadline; otherwise the model's target."""
    targets = Targets(ttft=None if own else limit)
    dispatch = Dispatch(DispatchConfig(AdmissionConfig(targets), router=ROUTER))
    load = WorkerLoad("w0", "n0", queued_prefill_tokens=queued, kv_blocks_total=1_000_000, max_seqs=64)
    dispatch.report("p", load, 0.0)
    for number in range(ahead):
        dispatch.arrive(request(f"q{number}", "b", 3000, deadline=1e6), 0.0)
    asked = request("r", prompt=prompt, deadline=limit if own else None)
    asked.expected_output_tokens = 50
    found = dispatch.router.choose(asked, 0.0)
    assert found is not None
    slack = 1.0 - dispatch.admission.config.slack if own else 1.0
    wait = dispatch.admission.queued_seconds(asked, 0.0) / slack + found.ttft
    # A prompt that takes longer than the target by itself is refused for its wait only.
    alone = dispatch.admission.config.patience * (found.ttft - found.wait)
    late = wait > (limit if own else max(limit, alone))
    effects = dispatch.arrive(asked, 0.0)
    refusals = [turn.refusal for turn in effects.turns if turn.request_id == "r" and turn.refusal is not None]
    assert bool(refusals) == late
    if refusals:
        assert refusals[0].retry_after >= 0 and dispatch.counters.refused == {refusals[0].reason: 1}


def test_a_refusal_at_its_turn_ends_a_request_as_well() -> None:
    w = world({"w0": 1})
    w.arrive(request("first", output=200))
    w.arrive(request("second", output=200))
    hasty = request("hasty", deadline=w.now + 30.0)
    w.arrive(hasty)
    assert "hasty" in w.waiting
    hasty.deadline = 5.0  # as if others had taken longer than predicted
    w.run(30.0)
    assert w.ended == {"first": "done", "second": "done", "hasty": "refused"}
    assert_empty(w.dispatch)


def test_late_first_tokens_make_it_careful_and_refusals_make_it_bold_again() -> None:
    w = world()
    for number in range(30):
        made = request(str(number))
        w.dispatch.arrive(made, w.now)
        w.dispatch.started(made.id, w.now + 3.0)
        w.dispatch.finish(made.id, w.now + 3.0, output=1)
    margin = w.dispatch.admission._margin
    assert 0.8 < margin <= 1.0
    refused = []
    for number in range(40):
        (turn,) = w.dispatch.arrive(request(f"h{number}", deadline=w.now + 0.5), w.now).turns
        refused.append(turn.refusal is not None)
        w.dispatch.finish(turn.request_id, w.now)
    assert refused[0] and not refused[-1] and refused == sorted(refused, reverse=True)
