"""The dispatch that gateways and the simulator drive: fairness, no starvation, refusals, and books that balance."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.absence import FIRST_GUESS_S, SILENCE_S
from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.costs import CostPriors
from serve_app.routing.dispatch import TICK_S, Dispatch, DispatchConfig, Effects
from serve_app.routing.fairness import FairConfig
from serve_app.routing.places import Held, free_after
from serve_app.routing.router import RouterConfig
from serve_app.routing.types import BatchLoad, RouteRequest, WorkerLoad

REPORT_S = 0.1
STEP_S = 0.05
ROUTER = RouterConfig(jitter=0.0)
# Prompts take next to nothing, and every step the same: places are what is short.
PLACES = CostPriors(
    prefill_step=1e-4,
    prefill_token=1e-7,
    prefill_attention=0.0,
    decode_step=STEP_S,
    decode_seq=0.0,
    decode_kv_token=0.0,
)


def request(name: str, tenant: str = "a", prompt: int = 100, output: int = 50, **more) -> RouteRequest:
    return RouteRequest(name, prompt, tenant=tenant, max_tokens=output, **more)


def report_of(worker: str, places: int, now: float, **more) -> WorkerLoad:
    return WorkerLoad(worker, "n0", stage="decode", max_seqs=places, kv_blocks_total=100_000, reported_at=now, **more)


def streams_of(one: RouteRequest) -> int:
    return one.streams


def blocks_of(one: RouteRequest) -> int:
    return one.prompt_tokens // 32 + 1


@dataclass
class World:
    """Workers with places, on a clock of their own. A request holds its places for a step a token; a batch request only
    goes on where others leave it one.
    """

    dispatch: Dispatch
    workers: dict[str, int] = field(default_factory=lambda: {"w0": 4})
    now: float = 0.0
    # By id: what became of it, and on which worker it runs.
    ended: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)  # weighted tokens by tenant
    waiting: dict[str, RouteRequest] = field(default_factory=dict)
    all: dict[str, RouteRequest] = field(default_factory=dict)
    peak: int = 0
    _events: list[tuple[float, int, str, str]] = field(default_factory=list)
    _number: int = 0
    _tick_at: float | None = None

    def __post_init__(self) -> None:
        for worker in self.workers:
            self.report(worker)
            self._at(self.now + REPORT_S, "report", worker)

    def report(self, worker: str) -> None:
        on_it = [self.all[name] for name, at in self.running.items() if at == worker]
        batch = [r for r in on_it if r.priority == "batch"]
        running, used = [sum(size(r) for r in on_it) - sum(size(r) for r in batch) for size in (streams_of, blocks_of)]
        load = report_of(worker, self.workers[worker], self.now, running=running, kv_blocks_used=used)
        load.batch = BatchLoad(running=sum(map(streams_of, batch)), kv_blocks_used=sum(map(blocks_of, batch)))
        self.apply(self.dispatch.report(f"process of {worker}", load, self.now))

    def arrive(self, new: RouteRequest) -> None:
        new.arrived_at = self.now
        self.waiting[new.id] = self.all[new.id] = new
        self.apply(self.dispatch.arrive(new, self.now))

    def apply(self, effects: Effects) -> None:
        for turn in effects.turns:
            ready = self.waiting.pop(turn.request_id)  # fails for a second turn
            if turn.refusal is not None:
                self.ended[ready.id] = "refused"
                continue
            assert turn.decision is not None
            worker = turn.decision.decode
            self.running[ready.id] = worker
            self.order.append(ready.id)
            on_it = [self.all[name] for name, at in self.running.items() if at == worker]
            used = sum(r.streams for r in on_it if r.priority == "realtime")
            self.peak = max(self.peak, used)
            self.dispatch.started(ready.id, self.now)
            self._at(self.now + ready.max_tokens * STEP_S, "finish", ready.id)
        if effects.tick_at is not None and self._tick_at is None:
            self._tick_at = effects.tick_at
            self._at(effects.tick_at, "tick", "")

    def finish(self, name: str) -> None:
        done = self.all[name]
        del self.running[name]
        self.ended[name] = "done"
        for _ in range(done.streams):
            self.dispatch.stream_ended(name)
        output = done.max_tokens * done.streams
        config = self.dispatch.queue.config
        cost = config.uncached_weight * done.prompt_tokens + config.output_weight * output
        self.served[done.tenant] = self.served.get(done.tenant, 0.0) + cost
        self.apply(self.dispatch.finish(name, self.now, output=output))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, kind, what = heappop(self._events)
            if kind == "report":
                self.report(what)
                self._at(self.now + REPORT_S, "report", what)
            elif kind == "tick":
                self._tick_at = None
                self.apply(self.dispatch.tick(self.now))
            elif what in self.running and self._paused(what):
                self._at(self.now + STEP_S, "finish", what)
            elif what in self.running:
                self.finish(what)
        self.now = until

    def _paused(self, name: str) -> bool:
        worker = self.running[name]
        on_it = [other for other, at in self.running.items() if at == worker]
        on_it.sort(key=lambda other: self.all[other].priority == "batch")
        return self.all[name].priority == "batch" and on_it.index(name) >= self.workers[worker]

    def _at(self, when: float, kind: str, what: str) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, kind, what))


def world(workers: dict[str, int] | None = None, **config) -> World:
    made = Dispatch(DispatchConfig(**{"router": ROUTER, "priors": PLACES, **config}))
    return World(made, workers or {"w0": 4})


def assert_empty(dispatch: Dispatch) -> None:
    """Nothing is remembered of requests that have ended."""
    assert (len(dispatch), len(dispatch.queue), dispatch.router.reserved) == (0, 0, 0)
    assert (dispatch.admission.in_flight.prefill, dispatch.admission.in_flight.decode) == (0, 0)
    assert (
        not dispatch.admission._admitted and not any(dispatch.admission._streams.values()) and dispatch._unrouted == 0
    )
    assert not dispatch.queue._charges and dispatch.queue.waiting_tokens() == 0
    assert all(worker.own == worker.coming == 0 for worker in dispatch.router.fleet.workers.values())


SIZES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 60)), min_size=25, max_size=40)


@given(SIZES, SIZES, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 2000.0]))
@settings(max_examples=25, deadline=None)
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
@settings(max_examples=30, deadline=None)
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


def long_streams(w: World, count: int, output: int, tenant: str = "a") -> None:
    for number in range(count):
        w.arrive(request(f"long{number}", tenant, output=output))


@pytest.mark.parametrize("places", [{"w0": 32}, {"w0": 20, "w1": 12}])
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
