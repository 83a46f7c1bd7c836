"""Places that long streams hold, as seen by those who ask how long they would wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.places import Held, free_after
from tests.routing.world import STEP_S, World, assert_empty, request, world
from tests.variants import some


def long_streams(w: World, count: int, output: int, tenant: str = "a") -> None:
    for number in range(count):
        w.arrive(request(f"long{number}", tenant, output=output))


@pytest.mark.parametrize("places", some([{"w0": 32}, {"w0": 20, "w1": 12}], {"w0": 32}))
def test_places_that_long_streams_hold_are_busy_until_they_end(places) -> None:
    w = world(places)
    long_streams(w, 40, 3000)
    w.run(5.0)
    assert len(w.running) == 32 and len(w.waiting) == 8
    left = 3000 * STEP_S - w.now
    for asked in ({"reject_if_busy": True}, {"deadline": w.now + 30.0}, {"deadline": w.now + left}):
        w.arrive(request(f"asks for {asked}", "b", **asked))
        (turn,) = w.dispatch.arrive(request("again", "b", arrived_at=w.now, **asked), w.now).turns
        assert w.ended[f"asks for {asked}"] == "refused"
        assert turn.refusal is not None and turn.refusal.retry_after == pytest.approx(left, rel=0.15)
    # The places come free together: a deadline behind that can be met, and is.
    patient = request("patient", "b", deadline=w.now + left + 60.0)
    w.arrive(patient)
    assert "patient" in w.waiting
    w.run(left + 1.0)
    assert "patient" in w.running or w.ended["patient"] == "done"
    w.run(3000 * STEP_S)
    assert_empty(w.dispatch)


def test_the_last_free_place_is_no_reason_to_refuse() -> None:
    w = world({"w0": 4})
    long_streams(w, 3, 3000)
    w.run(1.0)
    w.arrive(request("asked", "b", reject_if_busy=True))
    assert "asked" in w.running


def test_a_deadline_behind_others_that_wait_counts_their_places_as_well() -> None:
    w = world({"w0": 2})
    long_streams(w, 2, 100)
    long = 100 * STEP_S
    for number in range(4):
        w.arrive(request(f"wait{number}", output=100))
    # Two rounds go before it.
    for seconds, refused in ((1.5 * long, True), (3.5 * long / (1 - w.dispatch.admission.config.slack), False)):
        w.arrive(request(f"in {seconds}", output=100, deadline=w.now + seconds))
        assert (f"in {seconds}" in w.ended) == refused


def test_answers_that_are_shorter_than_they_may_be_are_expected_to_be() -> None:
    w = world({"w0": 4})
    for number in range(30):
        made = request(f"short{number}", "a", output=4096)
        w.dispatch.arrive(made, w.now)
        w.dispatch.started(made.id, w.now)
        w.dispatch.stream_ended(made.id)
        w.dispatch.finish(made.id, w.now, output=20)
    long_streams(w, 4, 4096)
    asked = request("asked", "b", deadline=w.now + 5.0)
    w.arrive(asked)
    assert "asked" in w.waiting  # one of them is over in a second, by all that is known
    w.run(2.0)
    # They have outlived what is usual: now they are taken at their word, long before the deadline.
    assert w.ended["asked"] == "refused"


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 4)), max_size=20),
    st.integers(0, 10),
    st.integers(1, 40),
    st.floats(1.0, 1000.0),
)
@settings(max_examples=100, deadline=None)
def test_places_come_free_as_streams_end(held, others, places, usual) -> None:
    held = sorted(Held(left, streams) for left, streams in held)
    after = free_after(places, held, others, usual)

    def free(at: float) -> float:
        return sum(h.streams for h in held if h.left <= at) + others * at / usual

    if others or sum(h.streams for h in held) >= places:
        assert free(after) >= places - 1e-6
        assert after == 0 or free(after * (1 - 1e-6) - 1e-9) < places
    assert free_after(0, held, others, usual) == 0
