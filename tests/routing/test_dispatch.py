"""The dispatch that gateways and the simulator drive: lost workers, and books that balance."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.dispatch import TICK_S, Dispatch, DispatchConfig, Effects
from serve_app.routing.types import WorkerLoad
from tests.routing.world import PLACES, ROUTER, assert_empty, request, world


def test_the_place_of_a_lost_worker_is_given_again() -> None:
    w = world({"w0": 2, "w1": 2})
    for number in range(8):
        w.arrive(request(str(number), output=100_000))
    assert len(w.running) == 4
    w.dispatch.lost("process of w0", w.now)
    lost = [name for name, worker in w.running.items() if worker == "w0"]
    for name in lost:
        decision = w.dispatch.move(name, w.now)
        assert decision is not None and decision.decode == "w1"
        w.running[name] = "w1"
    assert w.dispatch.move("nobody", w.now) is None
    # The successor reports: its places are free, though two of its requests went elsewhere.
    w.run(1.0)
    assert len(w.running) == 6 and sum(at == "w0" for at in w.running.values()) == 2
    for name in list(w.running):
        w.finish(name)
    w.run(1.0)
    assert len(w.running) == 2
    for name in list(w.running):
        w.finish(name)
    assert_empty(w.dispatch)


def test_a_kept_place_goes_to_others_when_its_tenant_does_not_come_back() -> None:
    """A tick is enough: no report and no arrival has to happen."""
    w = world({"w0": 64}, priors=replace(PLACES, decode_seq=5e-4), admission=AdmissionConfig(Targets(itl=0.054)))
    w.arrive(request("light", "light", output=100))
    for number in range(12):
        w.arrive(request(f"heavy{number}", "heavy", output=10_000))
    w.run(4.9)
    running = set(w.running)
    assert "light" in running and len(running) < 13
    # Between two reports.
    w.run(0.12)
    assert "light" in w.ended and set(w.running) == running - {"light"}
    w.run(0.15)
    assert len(w.running) == len(running)


OPS = st.lists(
    st.tuples(
        st.sampled_from(("arrive", "arrive", "arrive", "finish", "finish", "report", "start", "lost", "move", "leave")),
        st.integers(0, 1_000_000),
    ),
    max_size=120,
)


@given(OPS, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_arrival_ends_exactly_once_and_leaves_nothing_behind(ops, targets, zero, asked) -> None:
    limits = Targets(ttft=1.0, itl=0.02) if targets else Targets()
    dispatch = Dispatch(DispatchConfig(AdmissionConfig(limits), slots=3, scales_to_zero=zero, router=ROUTER))
    dispatch.absence.asked = asked
    now, waiting, going, outcomes = 0.0, set(), set(), {}

    def apply(effects: Effects) -> None:
        for turn in effects.turns:
            assert turn.request_id in waiting
            waiting.remove(turn.request_id)
            outcomes[turn.request_id] = "refused" if turn.refusal is not None else "turn"
            if turn.refusal is None:
                going.add(turn.request_id)
        assert (effects.tick_at is None) == (not len(dispatch.queue))

    for number, (op, value) in enumerate(ops):
        draw = random.Random(value)
        now += draw.random() * 0.1
        some = sorted(going)
        if op == "arrive":
            new = request(str(number), draw.choice("abc"), draw.randrange(1, 5000), draw.randrange(1, 300))
            new.streams, new.arrived_at = draw.choice((1, 1, 1, 3)), now
            new.priority = draw.choice(("realtime", "batch"))
            new.reject_if_busy, new.session = draw.random() < 0.1, draw.choice((None, "s"))
            new.deadline = draw.choice((None, None, now + draw.random() * 3))
            waiting.add(new.id)
            new.weight = draw.choice((1.0, 4.0))
            apply(dispatch.arrive(new, now))
        elif op == "report":
            worker = draw.choice(("w0", "w1"))
            load = WorkerLoad(worker, "n0", "mixed", "decode", draw.randrange(3000), draw.randrange(4), max_seqs=4)
            load = replace(load, kv_blocks_total=1000, reported_at=now)
            apply(dispatch.report(f"process of {worker}", load, now))
        elif op == "lost":
            dispatch.lost(f"process of {draw.choice(('w0', 'w1'))}", now)
        elif op == "leave" and waiting:
            left = draw.choice(sorted(waiting))
            waiting.remove(left)
            outcomes[left] = "left"
            apply(dispatch.finish(left, now))
        elif some and op == "start":
            dispatch.started(draw.choice(some), now)
        elif some and op == "move":
            dispatch.move(draw.choice(some), now)
        elif some and op == "finish":
            done = draw.choice(some)
            going.remove(done)
            if draw.random() < 0.5:
                dispatch.stream_ended(done)
            apply(dispatch.finish(done, now, cached=draw.randrange(100), output=draw.randrange(100)))
            apply(dispatch.finish(done, now))  # once more changes nothing
    while waiting or going:
        for done in sorted(going):
            going.remove(done)
            apply(dispatch.finish(done, now, output=1))
        now += TICK_S
        load = WorkerLoad("w0", "n0", max_seqs=4, kv_blocks_total=100_000, reported_at=now)
        apply(dispatch.report("process of w0", load, now))
        apply(dispatch.tick(now))
        assert now < 1000, "somebody waits for ever"
    assert len(outcomes) == sum(op == "arrive" for op, _ in ops)
    assert_empty(dispatch)
