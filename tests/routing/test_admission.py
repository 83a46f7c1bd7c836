"""Refused exactly when predicted late, with the predicted wait; tokens in flight never leak."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.admission import Admission, AdmissionConfig, Targets
from serve_app.routing.fairness import FairQueue
from serve_app.routing.types import Decision, Refusal
from tests.routing.fleets import load, request, router


def admission(*loads, ttft: float | None = None, **config) -> Admission:
    return Admission(router(*loads), FairQueue(), AdmissionConfig(Targets(ttft), **config))


@given(st.integers(0, 500_000), st.integers(1, 30_000), st.floats(0.01, 30.0), st.integers(0, 20))
@settings(max_examples=80, deadline=None)
def test_refused_exactly_when_predicted_late(queued: int, prompt: int, target: float, ahead: int) -> None:
    a = admission(load("a", queued_prefill_tokens=queued), ttft=target)
    for i in range(ahead):
        a.queue.push(request(f"q{i}", 3000))
    req = request("r", prompt)
    decision = a.router.choose(req, 0.0)
    predicted = a.queued_seconds(req) + decision.ttft
    outcome = a.consider(req, 0.0)
    # What takes longer than the target by itself is refused for its wait only.
    assert (outcome is not None) == (predicted > max(target, a.config.patience * (decision.ttft - decision.wait)))
    if outcome is not None:
        assert 0 <= outcome.retry_after <= predicted


def test_a_prompt_is_not_refused_for_its_length() -> None:
    """Trying again would not make it shorter. A deadline is the caller's own affair."""
    a = admission(load("a"), ttft=0.1)
    long = request("r", 30_000)
    assert a.router.choose(long, 0.0).ttft > 0.5
    assert a.consider(long, 0.0) is None and isinstance(a.place(long, 0.0), Decision)
    assert isinstance(a.consider(request("s", 30_000, deadline=0.1), 0.0), Refusal)
    waits = admission(load("a", queued_prefill_tokens=100_000), ttft=0.1)
    assert isinstance(waits.consider(long, 0.0), Refusal)


def test_a_deadline_of_the_request_goes_before_the_target() -> None:
    a = admission(load("a", queued_prefill_tokens=100_000), ttft=0.1)
    assert isinstance(a.consider(request("r"), 0.0), Refusal)
    assert a.consider(request("r", deadline=60.0), 0.0) is None
    b = admission(load("a", queued_prefill_tokens=100_000))
    assert b.consider(request("r"), 0.0) is None
    assert isinstance(b.consider(request("r", deadline=0.01), 0.0), Refusal)


def test_a_quarter_of_the_time_in_the_queue_is_kept_for_errors() -> None:
    """Whose deadline has passed is answered with an error, whatever has been computed for it by then."""
    a = admission(load("a"))
    for i in range(20):
        a.queue.push(request(f"q{i}", 2000))
    alone, queued = a.router.choose(request("r"), 0.0).ttft, a.queued_seconds(request("r"))
    assert isinstance(a.consider(request("r", deadline=1.3 * queued + alone), 0.0), Refusal)
    assert a.consider(request("r", deadline=1.4 * queued + alone), 0.0) is None
    # At its turn only the request itself is left to foresee.
    assert isinstance(a.place(request("r", deadline=1.05 * alone), 0.0), Decision)


def test_reject_if_busy_means_not_to_wait() -> None:
    assert admission(load("a")).consider(request("r", reject_if_busy=True), 0.0) is None
    busy = admission(load("a", queued_prefill_tokens=50_000)).consider(request("r", reject_if_busy=True), 0.0)
    assert isinstance(busy, Refusal) and busy.retry_after > 0.5


def test_a_place_is_given_while_workers_have_little_queued_and_not_beyond() -> None:
    a = admission(load("a"), load("b"))
    placed = 0
    for i in range(100):
        outcome = a.place(request(str(i), 4000), 0.0)
        if outcome is None:
            break
        placed += 1
    assert 2 <= placed < 20
    assert a.place(request("later", 4000), 60.0) is not None  # by then the queues have been worked off


def test_too_late_at_its_turn_is_refused_then() -> None:
    a = admission(load("a"), ttft=1.0)
    req = request("r", arrived_at=0.0)
    assert a.consider(req, 0.0) is None
    assert isinstance(a.place(req, 5.0), Refusal)


def test_tokens_in_flight_return_to_zero() -> None:
    draw = random.Random(1)
    a = admission(load("a"), load("b"))
    live: list[str] = []
    now = 0.0
    for i in range(300):
        now += 0.3
        outcome = a.place(request(str(i), draw.randint(1, 5000)), now)
        if isinstance(outcome, Decision):
            live.append(str(i))
        if live and draw.random() < 0.6:
            one = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.5:
                a.started(one, now)
            a.finished(one)
            a.finished(one)
    assert a.in_flight.prefill > 0
    for one in live:
        a.finished(one)
    assert (a.in_flight.prefill, a.in_flight.decode) == (0, 0)
    assert a.router.reserved == 0


def test_without_workers_nothing_is_refused_here() -> None:
    assert admission(ttft=0.1).consider(request("r"), 0.0) is None


def test_memory_is_bounded() -> None:
    a = admission(load("a"), max_waiting_tokens=10_000)
    for i in range(3):
        a.queue.push(request(f"q{i}", 3000))
    assert a.consider(request("r", 2000), 0.0).reason == "too many tokens wait for this model"
    assert a.consider(request("r", 500), 0.0) is None
    assert a.consider(request("r", 2000), 0.0).retry_after == pytest.approx(a.queued_seconds(request("r")), abs=1.0)
