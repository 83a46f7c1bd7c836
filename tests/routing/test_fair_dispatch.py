"""Who gets a place under load: fairness between tenants, real-time before batch, no starvation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.dispatch import TICK_S, Dispatch, DispatchConfig
from serve_app.routing.fairness import FairConfig
from tests.routing.world import ROUTER, STEP_S, assert_empty, report_of, request, world

SIZES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 60)), min_size=25, max_size=40)


@pytest.mark.slow
@given(SIZES, SIZES, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 2000.0]))
@settings(max_examples=12, deadline=None)
def test_tenants_that_always_wait_are_served_by_their_weights(first, second, weight, slack) -> None:
    w = world(fair=FairConfig(slack=slack))
    w.arrive(request("warm", "other", output=100))  # both queues stand before a place is free
    weights = {"a": 1.0, "b": weight}
    largest = 0.0
    for number in range(max(len(first), len(second))):
        for tenant, sizes in (("a", first), ("b", second)):
            prompt, output = sizes[number % len(sizes)]
            largest = max(largest, (prompt + 2 * output) / weights[tenant])
            w.arrive(request(f"{tenant}{number}", tenant, prompt, output, weight=weights[tenant]))
    while {r.tenant for r in w.waiting.values()} == {"a", "b"}:
        w.run(0.05)
        counters = w.dispatch.queue.counters()
        # What is under way is charged by its expected length until it ends.
        assert abs(counters["a"] - counters["b"]) <= slack + (2 + 2 * w.workers["w0"]) * largest
    w.run(200)
    assert set(w.ended.values()) == {"done"}
    assert_empty(w.dispatch)


def test_a_light_tenant_does_not_wait_behind_a_flood() -> None:
    w = world()
    for number in range(300):
        w.arrive(request(f"heavy{number}", "heavy", 1000))
    w.run(3.0)
    w.arrive(request("light", "light", 1000))
    before = len(w.order)
    w.run(20.0)
    assert w.order.index("light") <= before + 2


@pytest.mark.parametrize("targets", [Targets(), Targets(ttft=30.0, itl=0.06)])
def test_real_time_work_is_placed_as_if_there_were_no_batch_work(targets) -> None:
    turns: dict[bool, dict[str, float]] = {}
    for beside in (False, True):
        w = world(admission=AdmissionConfig(targets))
        seen = turns[beside] = {}
        for number in range(1000):
            if beside and number < 300 and number % 10 == 0:
                w.arrive(request(f"b{number}", "b", output=40, priority="batch"))
            if number % 30 == 0:
                w.arrive(request(f"r{number}", "a", output=20 + number % 50))
            w.run(0.01)
            seen |= {n: w.now for n in w.order if n.startswith("r") and n not in seen}
        w.run(300)
        assert_empty(w.dispatch)
        assert all(w.ended[n] == "done" for n in w.ended if n.startswith("b"))
        seen |= {n: -1.0 for n, how in w.ended.items() if how == "refused"}
    # What waits is looked at now and then, and beside batch requests at other moments.
    assert turns[True] == pytest.approx(turns[False], abs=2 * TICK_S) and len(turns[True]) > 20


def test_batch_work_is_sent_on_while_real_time_work_takes_every_place() -> None:
    """What it gets there is the engine's to say."""
    w = world()
    for number in range(200):
        w.arrive(request(f"r{number}", "a"))
    w.run(1.0)
    for number in range(50):
        w.arrive(request(f"b{number}", "b", priority="batch"))
    w.run(30.0)
    sent = [name for name in w.running if name.startswith("b")]
    # As many as its places, and no heap of them.
    assert 1 <= len(sent) <= 3 and len(w.waiting) > 100
    w.run(600)
    assert set(w.ended.values()) == {"done"}


def test_batch_work_fills_a_worker_and_a_little_of_its_queue() -> None:
    w = world({"w0": 8})
    for number in range(50):
        w.arrive(request(f"b{number}", "b", output=1000, priority="batch"))
    w.run(1.0)
    assert len(w.running) == 10
    # Its places and blocks are free for others, who find them at once.
    w.arrive(request("r", "a", reject_if_busy=True))
    assert w.running["r"] == "w0" and "r" not in w.ended
    # Another batch request that can't wait finds none.
    w.arrive(request("b", "c", priority="batch", reject_if_busy=True))
    assert w.ended["b"] == "refused"


def test_batch_work_asks_for_no_replicas_but_as_its_deadline_does() -> None:
    w = world(prefill_stage=False)
    before = w.dispatch.workers.needed(w.now)
    for number in range(500):
        w.arrive(request(f"b{number}", "b", prompt=3000, output=1000, priority="batch"))
    w.run(5.0)
    assert w.dispatch.workers.needed(w.now) == before == {"decode": 0.0}
    w.dispatch.workers.batch_needed = 1.5
    assert w.dispatch.workers.needed(w.now) == {"decode": 1.5}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4000), st.integers(1, 80), st.integers(1, 9)),
        min_size=5,
        max_size=40,
    ),
    st.sampled_from([None, 0.06]),
)
@settings(max_examples=8, deadline=None)
def test_nobody_starves_whatever_it_asks_for(asked, itl) -> None:
    """Requests of several streams too, more of them than a worker has places, beside a tenant that never stops."""
    w = world({"w0": 4, "w1": 6}, admission=AdmissionConfig(Targets(itl=itl)))
    for number, (tenant, prompt, output, streams) in enumerate(asked):
        w.arrive(request(f"{tenant}{number}", tenant, prompt, output, streams=streams))
    names, more = set(w.all), 0
    until = 60 + sum(2 * output * STEP_S * streams for _, _, output, streams in asked)
    while not names <= w.ended.keys():
        # Two tenants ask again whenever they are answered.
        for tenant in ("busy", "other"):
            if sum(r.tenant == tenant for r in w.waiting.values()) < 3:
                more += 1
                w.arrive(request(f"{tenant}{more}", tenant, 200, 30))
        w.run(0.1)
        assert w.now < until, f"{sorted(names - w.ended.keys())} starve"
    assert {w.ended[name] for name in names} == {"done"}


def test_answers_of_one_request_count_as_streams() -> None:
    w = world({"w0": 8})
    w.arrive(request("four", output=100, streams=4))
    w.arrive(request("three", output=100, streams=3))
    assert set(w.running) == {"four", "three"} and w.dispatch.admission.in_flight.decode == 7 * 100
    w.arrive(request("two", output=100, streams=2))
    w.arrive(request("one", "b", output=100))  # its tenant has fewer streams, and there is one place
    w.run(0.2)
    assert set(w.running) == {"four", "three", "one"} and w.peak == 8
    w.run(20.0)
    assert set(w.ended) == {"four", "three", "two", "one"}
    assert_empty(w.dispatch)


def test_each_answer_that_ends_frees_its_place() -> None:
    w = world({"w0": 4})
    w.arrive(request("four", output=100, streams=4))
    w.arrive(request("two", output=100, streams=2))
    w.run(0.2)
    assert set(w.running) == {"four"}
    for went, streams in (({"four"}, 3), ({"four", "two"}, 2)):
        w.dispatch.stream_ended("four")
        w.apply(w.dispatch.report("process of w0", report_of("w0", 4, w.now, running=streams), w.now))
        assert set(w.running) == went
    w.run(20.0)
    assert_empty(w.dispatch)


def test_answers_of_one_request_are_charged_one_by_one() -> None:
    w = world({"w0": 8})
    w.arrive(request("four", "a", output=100, streams=4))
    w.arrive(request("one", "b", output=100))
    charged = w.dispatch.queue.counters()
    output = w.dispatch.queue.config.output_weight * 100
    assert charged["a"] - charged["b"] == pytest.approx(3 * output)


def test_where_nobody_reports_as_many_streams_go_as_there_are_places() -> None:
    dispatch = Dispatch(DispatchConfig(slots=4, router=ROUTER))
    went = [len(dispatch.arrive(request(str(n), streams=s), 0.0).turns) for n, s in enumerate((2, 1, 2, 1))]
    assert went == [1, 1, 0, 0]
    assert [turn.request_id for turn in dispatch.finish("0", 1.0).turns] == ["2", "3"]
