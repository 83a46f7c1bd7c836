"""How many requests a runner keeps under way, and what a deadline asks for."""

from __future__ import annotations

import pytest

from serve_app.batch.job import Done
from serve_app.batch.pace import HOLD_S, LEAST, MOST, START_S, ModelState, Pace, WorkerState
from serve_app.state.deferred.batches import Waiting

OK = Done(200, b"{}")
NOW = 1e9


class World:
    def __init__(self, cores: int = 2, **states: ModelState) -> None:
        self.clock = 0.0
        self.states = dict(states)
        self.scaled: list[tuple[str, float]] = []
        self.pace = Pace(
            lambda: self.states, lambda m, r: self.scaled.append((m, r.replicas)), cores=cores, clock=lambda: self.clock
        )

    def plan(self, **left: Waiting) -> None:
        self.pace.plan(left, NOW + self.clock)


def worker(places: int = 32, node: str = "n", **more) -> WorkerState:
    return WorkerState(node, places, **more)


def test_an_idle_worker_is_filled_and_a_little_more() -> None:
    w = World(a=ModelState([worker(32), worker(8)]))
    assert w.pace.room("a") == 32 + 12 + 8 + 3


def test_beside_real_time_requests_there_is_room_for_what_rides_along() -> None:
    w = World(a=ModelState([worker(32, rows=0, realtime=1)]), b=ModelState([worker(32, "m", rows=9, realtime=2)]))
    assert (w.pace.room("a"), w.pace.room("b")) == (1, 9)
    w.states["a"] = ModelState([worker(32)])
    # They were there a moment ago.
    assert w.pace.room("a") == 1
    w.clock += HOLD_S
    assert w.pace.room("a") == 44


def test_models_that_share_cores_yield_to_each_other() -> None:
    w = World(a=ModelState([worker()]), b=ModelState([worker(realtime=1)]), encoder=ModelState((), calls=16))
    far = ModelState([worker(node="elsewhere")])
    w.states |= {"far": far, "gpu": ModelState([worker()], shares_cores=False)}
    assert (w.pace.room("far"), w.pace.room("gpu")) == (44, 44)
    for model in ("a", "encoder"):
        assert w.pace.room(model) == 1
        w.pace.told(model, OK, 2.0)
        assert w.pace.room(model) == 0
        # It had two seconds, which are 5 % of forty.
        w.clock += 37.9
        assert w.pace.room(model) == 0
        w.clock += 0.2
        assert w.pace.room(model) == 1
    w.states["b"] = ModelState([worker()])
    w.clock += HOLD_S
    assert (w.pace.room("a"), w.pace.room("encoder")) == (44, 16)


def test_models_that_sleep_are_started_one_after_another() -> None:
    asleep, awake = ModelState(sleeps=True), ModelState([worker()])
    w = World(a=asleep, b=asleep)
    assert (w.pace.room("a"), w.pace.room("b")) == (1, 0)
    w.states["a"] = awake
    assert (w.pace.room("a"), w.pace.room("b")) == (44, 1)
    w = World(a=asleep, b=asleep)
    assert w.pace.room("b") == 1 and w.pace.room("a") == 0
    # One that does not come up holds nobody up for ever.
    w.clock += START_S
    assert w.pace.room("a") == 1
    large = World(cores=64, a=asleep, b=asleep)
    assert (large.pace.room("a"), large.pace.room("b")) == (1, 1)


def test_a_model_that_is_not_here_has_its_requests_refused() -> None:
    assert World().pace.room("gone") == 1


@pytest.mark.parametrize(
    ("left_s", "share", "replicas"),
    [(86_400.0, LEAST, 0.0), (1000.0, None, 0.0), (400.0, MOST, 2.2)],
    ids=["far", "nearer", "too near"],
)
def test_share_and_replicas_rise_with_the_deadline(left_s, share, replicas) -> None:
    w = World(a=ModelState([worker()]))
    deadline = NOW + 600 + left_s
    while w.clock < 600:  # a request a second
        w.plan(a=Waiting(800, deadline))
        w.pace.told("a", OK, 1.0)
        w.clock += 1.0
    w.plan(a=Waiting(800, deadline))
    got = w.pace.share("a")
    assert got == share if share is not None else LEAST < got < MOST
    assert (w.scaled[-1][1] if w.scaled else 0.0) == pytest.approx(replicas, rel=0.1)
    # Nothing is asked for once there is nothing left to do.
    w.plan()
    assert w.pace.share("a") == LEAST and (not w.scaled or w.scaled[-1] == ("a", 0.0))


def test_nothing_is_asked_for_before_the_rate_is_known() -> None:
    w = World(a=ModelState([worker()]))
    w.plan(a=Waiting(1_000_000, NOW + 10))
    assert w.pace.share("a") == LEAST and not w.scaled


def test_requests_that_are_to_be_tried_again_are_no_progress() -> None:
    w = World(a=ModelState([worker()]))
    while w.clock < 100:
        w.plan(a=Waiting(10, NOW + 100_000))
        w.pace.told("a", Done(429, b"", retry_after=1.0), 0.1)
        w.clock += 1.0
    w.plan(a=Waiting(10, NOW + 100_000))
    assert w.pace.share("a") == LEAST
