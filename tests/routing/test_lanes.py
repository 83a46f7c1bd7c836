"""Long prompts take a share of the workers at most, while these are busy, and let others pass."""

from __future__ import annotations

from random import Random

from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.costs import CostModel
from serve_app.routing.dispatch import Dispatch, DispatchConfig
from serve_app.routing.fairness import FairQueue
from serve_app.routing.fleet import Fleet
from serve_app.routing.lanes import Lanes
from serve_app.routing.types import RouteRequest
from tests.routing.fleets import load, request

WORKERS = 8


def occupy(fleet: Fleet, now: float) -> None:
    """All workers have a little to do still."""
    for worker in fleet.workers.values():
        worker.busy_until = max(worker.busy_until, now + 0.02)


def test_what_is_long_goes_by_the_target() -> None:
    short, long, batch = request("a"), request("b"), request("c", priority="batch")
    lanes = Lanes(1.0)
    lanes.measure(short, 0.5, 0.0)
    lanes.measure(long, 0.7, 0.0)
    lanes.measure(batch, 70.0, 0.0)
    assert (short.long, long.long, batch.long) == (False, True, False)
    Lanes(None).measure(short, 70.0, 0.0)
    assert not short.long


def test_busy_workers_are_shared_and_idle_ones_are_not() -> None:
    fleet, lanes = Fleet(CostModel(), Random(0)), Lanes(1.0)
    for number in range(WORKERS):
        fleet.report(load(f"w{number}", "decode" if number < 2 else "prefill"))
    lanes.inside = 5
    assert lanes.open(fleet, 0.0)
    fleet.congestion = 4.0
    # Six prefill and have nothing to do: three may have long prompts.
    lanes.inside = 3
    assert not lanes.open(fleet, 0.0)
    lanes.inside = 2
    assert lanes.open(fleet, 0.0)
    # As long as that is half of them.
    for name in ("w2", "w3", "w4"):
        fleet.workers[name].busy_until = 0.1
    assert lanes.open(fleet, 0.0)
    occupy(fleet, 0.0)
    assert not lanes.open(fleet, 0.0)
    # Six prefill: two may have long prompts.
    lanes.inside = 2
    assert not lanes.open(fleet, 0.0)
    lanes.inside = 1
    assert lanes.open(fleet, 0.0)


def test_workers_that_decode_count_for_what_they_prefill() -> None:
    fleet, lanes = Fleet(CostModel(), Random(0)), Lanes(1.0)
    for number in range(WORKERS):
        fleet.report(load(f"w{number}", "decode" if number < 6 else "prefill"))
    fleet.congestion = 4.0
    occupy(fleet, 0.0)
    # Two prefill, and short prompts take half of one: there is room for one long prompt beside.
    for tick in range(400):
        lanes.measure(request(), 0.05, tick * 0.1)
    lanes.inside = 1
    occupy(fleet, 40.0)
    assert not lanes.open(fleet, 40.0)
    for number in range(6):
        fleet.workers[f"w{number}"].prefilling = 0.8
    assert lanes.open(fleet, 40.0)


def test_long_requests_wait_in_order_and_hold_up_nobody() -> None:
    queue = FairQueue()
    for name, tokens, long in (("l1", 9000, True), ("s1", 100, False), ("l2", 8000, True), ("s2", 200, False)):
        queue.push(RouteRequest(name, tokens, tenant="a", long=long))
    queue.push(RouteRequest("other", 9000, tenant="b", long=True))

    def order() -> list[str]:
        return [head.id for head in queue.heads(8)]

    assert order() == ["s1", "other"]
    queue.long_open = False
    assert order() == ["s1"]
    # Of its own tenant's, a short one has the short ones before it; a long one all of them that are shorter.
    assert queue.ahead(RouteRequest("new", 150, tenant="a")) < 1000
    assert queue.ahead(RouteRequest("new", 8500, tenant="a", long=True)) > 8000
    for name in ("s1", "s2"):
        queue.take(name)
    assert order() == [] and len(queue) == 3
    queue.long_open = True
    assert set(order()) == {"l2", "other"}
    for name in ("l1", "l2", "other"):
        queue.remove(name)
    assert not len(queue) and order() == []


def test_a_burst_finds_workers_beside_long_prompts() -> None:
    dispatch = Dispatch(DispatchConfig(admission=AdmissionConfig(Targets(ttft=1.0))))
    for number in range(WORKERS):
        dispatch.report(f"p{number}", load(f"w{number}", "prefill" if number else "decode"), 0.0)
    dispatch.router.fleet.congestion = 4.0
    occupy(dispatch.router.fleet, 1.0)
    turns = []
    for number in range(6):
        turns += dispatch.arrive(request(f"long{number}", 45_000, arrived_at=1.0), 1.0).turns
    sent = [turn for turn in turns if turn.decision is not None]
    assert len(sent) == 2 and dispatch.admission.lanes.inside == 2
    for number in range(4):
        [turn] = dispatch.arrive(request(f"short{number}", 500, arrived_at=1.0), 1.0).turns
        assert turn.decision is not None and turn.decision.wait < 0.1
    # One is computed: the next may go.
    occupy(dispatch.router.fleet, 1.5)
    dispatch.started(sent[0].request_id, 1.5)
    assert dispatch.admission.lanes.inside == 1
    after = [turn for turn in dispatch.tick(1.5).turns if turn.decision is not None]
    assert [turn.request_id for turn in after] == ["long2"] and dispatch.admission.lanes.inside == 2
    for request_id in [f"long{n}" for n in range(6)] + [f"short{n}" for n in range(4)]:
        dispatch.finish(request_id, 2.0)
    assert dispatch.admission.lanes.inside == 0


def test_one_that_will_not_wait_does_not_wait_for_other_long_ones() -> None:
    dispatch = Dispatch(DispatchConfig(admission=AdmissionConfig(Targets(ttft=1.0))))
    for number in range(WORKERS):
        dispatch.report(f"p{number}", load(f"w{number}", "prefill" if number else "decode"), 0.0)
    dispatch.router.fleet.congestion = 4.0
    occupy(dispatch.router.fleet, 1.0)
    for number in range(2):
        dispatch.arrive(request(f"long{number}", 45_000, arrived_at=1.0), 1.0)
    assert dispatch.admission.lanes.inside == 2
    [turn] = dispatch.arrive(request("hasty", 45_000, arrived_at=1.0, reject_if_busy=True), 1.0).turns
    assert turn.refusal is not None and turn.refusal.retry_after > 0.6
    [turn] = dispatch.arrive(request("short", 500, arrived_at=1.0, reject_if_busy=True), 1.0).turns
    assert turn.decision is not None


def test_without_a_worker_for_prefill_nothing_is_held_back_for_ever() -> None:
    fleet, lanes = Fleet(CostModel(), Random(0)), Lanes(1.0, inside=1)
    for at in (0.0, 60.0):
        for name, role in (("d", "decode"), ("p", "prefill")):
            fleet.report(load(name, role, at=at, queued_prefill_tokens=9000))
    assert fleet.congestion > 4.0 and not lanes.open(fleet, 0.0)
    fleet.remove("d")
    assert not lanes.open(fleet, 0.0)
    fleet.report(load("d", "decode", at=61.0))
    fleet.remove("p")
    fleet.report(load("d", "decode", at=62.0))
    assert fleet.congestion == 0.0 and lanes.open(fleet, 0.0)


def test_long_prompts_get_what_short_ones_leave() -> None:
    fleet, lanes = Fleet(CostModel(), Random(0)), Lanes(1.0)
    for number in range(WORKERS):
        fleet.report(load(f"w{number}", "decode" if number < 2 else "prefill"))
    fleet.congestion = 4.0
    occupy(fleet, 1000.0)
    # Six prefill, and short prompts take four of them: there is room for one long prompt.
    for tick in range(400):
        lanes.measure(request(), 0.4, tick * 0.1)
    assert lanes.open(fleet, 40.0)
    lanes.enter(1.0, 40.0)
    assert not lanes.open(fleet, 40.0)
    lanes.leave()
    # They take all six: long ones have a twentieth of the time, and wait when they have had it.
    for tick in range(400, 1200):
        lanes.measure(request(), 0.6, tick * 0.1)
    assert lanes.open(fleet, 120.0)
    lanes.enter(4.0, 120.0)
    lanes.leave()
    assert not lanes.open(fleet, 120.0) and not lanes.open(fleet, 121.0)
    for tick in range(1200, 1400):
        lanes.measure(request(), 0.6, tick * 0.1)
    assert lanes.open(fleet, 140.0)
    # Of two gateways each has half of the workers to give.
    for tick in range(1400, 2000):
        lanes.measure(request(), 0.2, tick * 0.1)
    lanes.enter(1.0, 200.0)
    assert lanes.open(fleet, 200.0) and not lanes.open(fleet, 200.0, gateways=2)


def test_long_requests_that_are_late_are_refused_where_they_are_held_back() -> None:
    dispatch = Dispatch(DispatchConfig(admission=AdmissionConfig(Targets(ttft=1.0))))
    for number in range(WORKERS):
        dispatch.report(f"p{number}", load(f"w{number}", "prefill" if number else "decode"), 0.0)
    dispatch.router.fleet.congestion = 4.0
    occupy(dispatch.router.fleet, 1.0)
    for number in range(4):
        dispatch.arrive(request(f"long{number}", 45_000, arrived_at=1.0), 1.0)
    assert dispatch.admission.lanes.inside == 2 and len(dispatch.queue) == 2
    occupy(dispatch.router.fleet, 1.3)
    assert not dispatch.tick(1.3).turns
    occupy(dispatch.router.fleet, 4.0)
    turns = dispatch.tick(4.0).turns
    assert [turn.request_id for turn in turns] == ["long2", "long3"] and dispatch.admission.lanes.inside == 2
    assert all(turn.refusal is not None for turn in turns) and not len(dispatch.queue)
