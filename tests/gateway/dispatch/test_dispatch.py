"""The dispatcher with real policy and made-up workers: order, places, refusals, and what survives a lost worker."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path as File

import numpy as np
import pytest
from msgspec.structs import replace

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import GenerateRequest
from serve_app.catalog.load import load_catalog
from serve_app.gateway.backends.engine import _route_request
from serve_app.gateway.dispatch import dispatcher as dispatching
from serve_app.gateway.dispatch.dispatcher import Destination, Dispatcher, Ticket
from serve_app.routing.absence import SILENCE_S
from serve_app.routing.types import RouteRequest
from serve_app.sampling_params import SamplingParams
from serve_app.state.accounts import Caller
from serve_app.state.traces import Trace
from serve_app.tasks.backend import Prepared
from serve_app.tasks.model import ServedModel
from serve_app.wire.generate import HERE
from serve_app.wire.load import LoadReport

CHAT = "@cf/pico/pico-instruct"
# A step of 512 prompt tokens takes half a second: slow enough that a few prompts are a queue.
STEPS = ((512, 0, 0, 0, 0.5),) * 12
IDLE = LoadReport(
    "d1", CHAT, "decode", "decode", "n1", max_seqs=8, total_blocks=1000, block_tokens=32, max_batch_tokens=512
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def model():
    catalog = load_catalog()
    return ServedModel(catalog[CHAT], catalog[CHAT].serving["local"], catalog.source(CHAT), File("/nonexistent"))


@pytest.fixture
def dispatcher(model, clock):
    return Dispatcher(model, clock)


def slow_worker(dispatcher: Dispatcher, name: str = "d1", **now) -> None:
    report = replace(IDLE, replica=name, steps=STEPS, **now)
    dispatcher.report(f"process of {name}", report)


def ticket(n: int, tokens: int = 512, tenant: str = "a", **fields) -> Ticket:
    request = RouteRequest(f"{tenant}{n}", tokens, max_tokens=16, tenant=tenant, arrived_at=Clock.now, **fields)
    return Ticket(request, Trace())


async def entered(dispatcher: Dispatcher, *tickets: Ticket) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(dispatcher.enter(t)) for t in tickets]
    await asyncio.sleep(0)
    return tasks


async def drain(dispatcher: Dispatcher, tickets: list[Ticket], tasks: list[asyncio.Task[None]]) -> list[str]:
    """Lets one client after another have its answer, at a worker that has done with all of them; the order in which
    they had their turns.
    """
    order = [t.request.id for t in tickets if t.placed]
    open_ = [t for t in tickets if t.placed]
    while len(order) < len(tickets):
        dispatcher.start(open_[0])
        dispatcher.finish(open_.pop(0), cached=0, output=16)
        dispatcher._clock.now += 5.0
        for ticket in open_:
            dispatcher.stream_ended(ticket)
        dispatcher.report("process of d1", IDLE)
        new = [t for t in tickets if t.placed and t.request.id not in order]
        assert new, "nobody has a turn although the worker is idle"
        order += [t.request.id for t in new]
        open_ += new
    await asyncio.gather(*tasks)
    return order


async def test_without_reports_serve_chooses_as_far_as_it_has_places(dispatcher, model):
    tickets = [ticket(i) for i in range(model.slots + 2)]
    tasks = await entered(dispatcher, *tickets)
    assert [t.placed for t in tickets] == [True] * model.slots + [False] * 2
    assert dispatcher.destination(tickets[0]) == Destination()
    dispatcher.finish(tickets[0])
    assert tickets[model.slots].placed and not tickets[-1].placed
    dispatcher.finish(tickets[1])
    await asyncio.gather(*tasks)


async def test_an_idle_worker_is_named_and_a_full_one_lets_requests_wait_here(dispatcher):
    slow_worker(dispatcher)
    tickets = [ticket(i, 2048) for i in range(6)]
    tasks = await entered(dispatcher, *tickets)
    placed = [t for t in tickets if t.placed]
    assert 1 <= len(placed) < 6
    assert dispatcher.destination(placed[0]) == Destination("decode", "d1", HERE)
    assert dispatcher.stats()["waiting"] == {"a": 6 - len(placed)}
    assert await drain(dispatcher, tickets, tasks) == [t.request.id for t in tickets]
    assert dispatcher.stats()["waiting"] == {}


async def test_a_light_tenant_passes_a_heavy_ones_queue(dispatcher):
    slow_worker(dispatcher)
    heavy = [ticket(i, tenant="heavy") for i in range(20)]
    light = [ticket(i, tenant="light") for i in range(3)]
    tasks = await entered(dispatcher, *heavy, *light)
    order = await drain(dispatcher, [*heavy, *light], tasks)
    # Of two that both wait, each is served in turn: the light one's three are through among the first eight.
    assert max(order.index(t.request.id) for t in light) < 8 + 4


async def test_weights_share_and_batch_comes_behind(dispatcher):
    slow_worker(dispatcher)
    one = [ticket(i, tenant="one", weight=1.0) for i in range(24)]
    three = [ticket(i, tenant="three", weight=3.0) for i in range(24)]
    later = [ticket(i, tenant="later", priority="batch") for i in range(8)]
    tasks = await entered(dispatcher, *later, *one, *three)
    order = await drain(dispatcher, [*later, *one, *three], tasks)
    first = order[8:28]  # what went before anybody had to wait says nothing
    served = {name: sum(o.startswith(name) for o in first) for name in ("one", "three", "later")}
    assert served["three"] >= 2 * served["one"] > 0 and served["later"] <= 3


async def test_waiting_again_and_again_costs_no_turn(dispatcher):
    """A tenant whose only request is looked at and can't go yet keeps its counter: nobody is lifted past it."""
    slow_worker(dispatcher)
    heavy = [ticket(i, tenant="heavy") for i in range(12)]
    tasks = await entered(dispatcher, *heavy)
    light = ticket(0, tenant="light")
    tasks += await entered(dispatcher, light)
    counter = dispatcher.policy.queue.counters()["light"]
    for _ in range(50):
        dispatcher._tick()
    assert dispatcher.policy.queue.counters()["light"] == counter
    await drain(dispatcher, [*heavy, light], tasks)


async def test_a_deadline_that_cannot_be_met_is_refused_before_anything_is_sent(dispatcher, clock):
    slow_worker(dispatcher, queued_tokens=20_000, waiting=10)
    late = ticket(1, deadline=clock.now + 2.0)
    with pytest.raises(OutOfCapacity) as refused:
        await dispatcher.enter(late)
    dispatcher.finish(late)
    assert refused.value.status == 429 and refused.value.code == 3040
    # 20,000 tokens at about 1,000 a second.
    assert 5 < refused.value.retry_after < 40
    patient = ticket(2, deadline=clock.now + 120.0)
    (task,) = await entered(dispatcher, patient)
    assert not task.done() and not patient.placed
    clock.now += 200  # its turn comes too late
    dispatcher.report("process of d1", replace(IDLE, queued_tokens=20_000, waiting=10))
    with pytest.raises(OutOfCapacity):
        await task
    dispatcher.finish(patient)
    assert sum(dispatcher.policy.counters.refused.values()) == 2


async def test_reject_if_busy(dispatcher):
    slow_worker(dispatcher)
    first = ticket(0, reject_if_busy=True)
    await dispatcher.enter(first)
    slow_worker(dispatcher, queued_tokens=4000)
    second = ticket(1, reject_if_busy=True)
    with pytest.raises(OutOfCapacity):
        await dispatcher.enter(second)
    dispatcher.finish(second)
    dispatcher.finish(first)


async def test_who_leaves_the_queue_is_forgotten(dispatcher):
    slow_worker(dispatcher)
    tickets = [ticket(i, 2048) for i in range(8)]
    tasks = await entered(dispatcher, *tickets)
    leaving = [(t, task) for t, task in zip(tickets, tasks, strict=True) if not t.placed]
    for waiting, task in leaving:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        dispatcher.finish(waiting)
    assert dispatcher.stats()["waiting"] == {} and not dispatcher._waiting
    for t in tickets:
        if t.placed:
            dispatcher.finish(t, output=1)
    assert dispatcher.policy.admission.in_flight.prefill == dispatcher.policy.admission.in_flight.decode == 0


async def test_waiting_requests_survive_the_loss_of_all_workers(dispatcher):
    slow_worker(dispatcher)
    tickets = [ticket(i, 2048) for i in range(6)]
    tasks = await entered(dispatcher, *tickets)
    waiting = [t for t in tickets if not t.placed]
    assert waiting
    dispatcher.lost("process of d1")
    moved = tickets[0]
    await dispatcher.move(moved, moved.decision)
    assert moved.decision is None and dispatcher.destination(moved) == Destination()
    slow_worker(dispatcher, "d2")
    await dispatcher.move(moved, None)
    assert dispatcher.destination(moved).replica == "d2"
    dispatcher._clock.now += 30
    dispatcher.report("process of d2", replace(IDLE, replica="d2"))
    for t in tickets:
        if t.placed:
            dispatcher.finish(t, output=1)
    while any(not t.placed for t in tickets):
        dispatcher._clock.now += 30
        dispatcher.report("process of d2", replace(IDLE, replica="d2"))
        for t in tickets:
            if t.placed:
                dispatcher.finish(t, output=1)
    await asyncio.gather(*tasks)
    assert all(t.decision.decode == "d2" for t in waiting)


async def test_what_was_under_way_waits_here_for_the_next_worker(dispatcher):
    """And not in Serve's queue, which knows neither turns nor deadlines; each stream of a request moves once."""
    dispatcher.expect_reports()
    slow_worker(dispatcher)
    moved = ticket(1, streams=2)
    await dispatcher.enter(moved)
    gone = moved.decision
    dispatcher.lost("process of d1")
    moving = [asyncio.ensure_future(dispatcher.move(moved, gone)) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in moving)
    waiting = ticket(2)
    entering = asyncio.ensure_future(dispatcher.enter(waiting))
    await asyncio.sleep(0.02)
    assert not waiting.placed and dispatcher.stats()["waiting"] == {"a": 1}
    slow_worker(dispatcher, "d2")
    await asyncio.wait_for(asyncio.gather(*moving, entering), 60)
    assert moved.decision.decode == waiting.decision.decode == "d2"
    assert dispatcher.policy.counters.unrouted == 0
    # A stream of which the loss is told late does not take the new worker away.
    await dispatcher.move(moved, gone)
    assert [w.worker for w in dispatcher.policy.workers.loads] == ["d2"]


async def test_a_moved_request_goes_without_a_report_where_none_can_come(dispatcher, clock, monkeypatch):
    monkeypatch.setattr(dispatching, "LOOK_S", 0.01)
    dispatcher.expect_reports()
    slow_worker(dispatcher)
    await dispatcher.enter(moved := ticket(1))
    dispatcher.lost("process of d1")
    moving = asyncio.ensure_future(dispatcher.move(moved, moved.decision))
    dispatcher.told(True)
    await asyncio.sleep(0.05)
    assert not moving.done()
    clock.now += SILENCE_S + 0.1
    await asyncio.wait_for(moving, 60)
    assert moved.decision is None


async def test_a_replaced_worker_takes_its_replicas_name_over(dispatcher):
    slow_worker(dispatcher)
    dispatcher.report("its successor", IDLE)
    dispatcher.lost("process of d1")  # told late: the replica has another worker already
    assert [w.worker for w in dispatcher.policy.workers.loads] == ["d1"]
    dispatcher.lost("its successor")
    assert dispatcher.policy.workers.loads == []


async def test_silent_workers_get_nothing_new(dispatcher, clock):
    slow_worker(dispatcher)
    slow_worker(dispatcher, "d2")
    clock.now += 10
    dispatcher.report("process of d2", replace(IDLE, replica="d2"))
    assert [w.worker for w in dispatcher.policy.workers.loads] == ["d2"]


async def test_an_account_sees_its_own_queue_only(dispatcher):
    slow_worker(dispatcher)
    tasks = await entered(dispatcher, *(ticket(i, 4096, tenant="a") for i in range(4)))
    assert dispatcher.stats("b") == {"waiting": {"b": 0}}
    assert dispatcher.stats("a")["waiting"]["a"] > 0 and set(dispatcher.stats("a")) == {"waiting"}
    for task in tasks:
        task.cancel()


async def test_nothing_is_left_behind_whatever_happens(dispatcher, clock):
    """Random arrivals, reports, ends, losses and departures: in the end all books are empty."""
    rng = random.Random(7)
    live: list[tuple[Ticket, asyncio.Task[None]]] = []
    for step in range(1500):
        clock.now += rng.random() * 0.2
        event = rng.random()
        if event < 0.35:
            deadline = clock.now + rng.random() * 5 if rng.random() < 0.3 else None
            new = ticket(step, rng.randrange(1, 3000), rng.choice("abc"), deadline=deadline, weight=rng.choice((1, 4)))
            new.request.arrived_at = clock.now
            live.append((new, (await entered(dispatcher, new))[0]))
        elif event < 0.7 and live:
            done, task = live.pop(rng.randrange(len(live)))
            if not task.done():
                task.cancel()
            elif task.exception() is None and rng.random() < 0.8:
                dispatcher.start(done)
            await asyncio.gather(task, return_exceptions=True)
            dispatcher.finish(done, cached=0, output=rng.randrange(20))
        elif event < 0.95:
            slow_worker(dispatcher, rng.choice(("d1", "d2", "p1")), queued_tokens=rng.randrange(2000))
        else:
            dispatcher.lost(f"process of {rng.choice(('d1', 'd2', 'p1'))}")
    for done, task in live:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        dispatcher.finish(done)
    assert not dispatcher._waiting and not len(dispatcher.policy.queue) and not len(dispatcher.policy)
    assert dispatcher.policy.admission.in_flight.prefill == dispatcher.policy.admission.in_flight.decode == 0
    assert dispatcher.policy.router.reserved == 0


async def test_a_target_between_tokens_bounds_the_streams_of_a_worker(model, clock):
    profile = model.profile.model_copy(update={"targets": model.profile.targets.model_copy(update={"itl_s": 0.005})})
    dispatcher = Dispatcher(dataclasses.replace(model, profile=profile), clock)
    # Two milliseconds a step, and a half more for each sequence: five of them take 4.5.
    steps = tuple((0, 0, b, 40 * b, 0.002 + 0.0005 * b) for b in range(1, 9)) * 2
    for _ in range(8):
        clock.now += 0.1
        dispatcher.report("process of d1", replace(IDLE, steps=steps))
    tickets = [ticket(i, 33) for i in range(8)]
    tasks = await entered(dispatcher, *tickets)
    placed = [t for t in tickets if t.placed]
    assert 1 <= len(placed) <= 5
    assert await drain(dispatcher, tickets, tasks) == [t.request.id for t in tickets]


async def test_a_deadline_counts_the_turns_of_those_ahead(dispatcher, clock):
    """Short prompts and full places: how long others' turns took tells how long the queue is."""
    slow_worker(dispatcher)
    tickets = [ticket(i, 33) for i in range(60)]
    for t in tickets:
        t.request.max_tokens = 400
    tasks = await entered(dispatcher, *tickets)
    assert dispatcher.stats()["waiting"]["a"] > 30
    open_ = [t for t in tickets if t.placed]
    for _ in range(20):
        dispatcher.start(open_[0])
        dispatcher.finish(open_.pop(0), output=400)
        clock.now += 4.0
        dispatcher.report("process of d1", replace(IDLE, running=7))
        open_ += [t for t in tickets if t.placed and t not in open_ and not t.started]
    waits = dispatcher.stats()["waiting"]["a"]
    assert waits > 10
    hasty = ticket(99, 33, deadline=clock.now + 10.0)
    with pytest.raises(OutOfCapacity) as refused:
        await dispatcher.enter(hasty)
    dispatcher.finish(hasty)
    assert 10 < refused.value.retry_after < 8 * waits
    for task in tasks:
        task.cancel()


async def test_a_model_that_has_scaled_to_zero_says_when_to_come_back(model, clock):
    none = model.profile.model_copy(update={"decode": model.profile.decode.model_copy(update={"min_replicas": 0})})
    dispatcher = Dispatcher(dataclasses.replace(model, profile=none), clock)
    woken = []
    dispatcher.start_worker = lambda: woken.append(clock.now)
    for asks in ({"reject_if_busy": True}, {"deadline": clock.now + 3.0}):
        with pytest.raises(OutOfCapacity) as refused:
            await dispatcher.enter(turned_away := ticket(1, **asks))
        dispatcher.finish(turned_away)
        assert refused.value.retry_after == 10.0
    assert len(woken) == 1  # who comes back shall find a worker
    await dispatcher.enter(patient := ticket(2))
    assert patient.placed and patient.decision is None
    # Its prompt is computed where it is decoded: a prefill worker would have to start as well.
    assert dispatcher.destination(patient) == Destination(prefill=HERE)
    clock.now += 4.0
    slow_worker(dispatcher)
    dispatcher.finish(patient)
    dispatcher.lost("process of d1")
    with pytest.raises(OutOfCapacity) as refused:
        await dispatcher.enter(turned_away := ticket(3, reject_if_busy=True))
    assert refused.value.retry_after == 4.0  # as long as it took the last time
    dispatcher.finish(turned_away)


async def test_who_has_fewer_streams_may_stretch_the_target_a_little(model, clock):
    profile = model.profile.model_copy(update={"targets": model.profile.targets.model_copy(update={"itl_s": 0.005})})
    dispatcher = Dispatcher(dataclasses.replace(model, profile=profile), clock)
    steps = tuple((0, 0, b, 40 * b, 0.002 + 0.0005 * b) for b in range(1, 9)) * 2
    for _ in range(30):
        clock.now += 0.1
        dispatcher.report("process of d1", replace(IDLE, steps=steps))
    heavy = [ticket(i, 33, tenant="heavy") for i in range(10)]
    tasks = await entered(dispatcher, *heavy)
    running = sum(t.placed for t in heavy)
    assert 1 <= running < 8
    light = [ticket(i, 33, tenant="light") for i in range(6)]
    tasks += await entered(dispatcher, *light)
    assert 1 <= sum(t.placed for t in light) <= 3 and sum(t.placed for t in heavy) == running
    await drain(dispatcher, [*heavy, *light], tasks)
    dispatcher.finish(heavy[0])
    assert dispatcher.stats()["waiting"] == {}


async def test_of_two_gateways_one_plans_the_roles_and_the_other_takes_them_as_reported(model, clock):
    one, two = Dispatcher(model, clock, lambda: "one"), Dispatcher(model, clock, lambda: "two")
    roles = {"d1": "mixed", "d2": "mixed"}
    for _ in range(30):
        clock.now += 0.1
        for gateway in (one, two):
            for worker, role in roles.items():
                report = replace(IDLE, replica=worker, role=role, planner="one", gateways=2)
                gateway.report(f"process of {worker}", report)
        # As workers do: what the one that plans wishes for is what they say.
        roles |= one.roles
    assert sorted(roles.values()) == ["decode", "prefill"]
    for gateway in (one, two):
        assert {load.worker: load.role for load in gateway.policy.workers.loads} == roles
    assert two.roles == {} and two.stats()["plan"]["why"] == "another gateway plans"
    # The one that planned is gone: the other goes on from what is.
    for _ in range(30):
        clock.now += 0.1
        for worker, role in roles.items():
            two.report(f"process of {worker}", replace(IDLE, replica=worker, role=role, planner="two"))
    assert two.roles == roles


async def test_first_tokens_that_come_late_make_it_careful_and_nobody_is_kept_out_for_ever(dispatcher, clock):
    slow_worker(dispatcher)

    def asks(name: int) -> Ticket:
        asked = ticket(name, 64, deadline=clock.now + 2.0)
        asked.request.arrived_at = clock.now
        asyncio.ensure_future(dispatcher.enter(asked)).add_done_callback(lambda done: done.exception())
        return asked

    let_in = []
    for n in range(120):
        asked, late = asks(n), 5.0 if n < 60 else 0.0
        await asyncio.sleep(0)
        let_in.append(asked.placed)
        clock.now += late
        if asked.placed:
            dispatcher.start(asked)
        dispatcher.finish(asked, output=4 if asked.placed else 0)
        clock.now += 1.0
        dispatcher.report("process of d1", IDLE)
    assert let_in[0] and all(let_in[-20:])
    assert 0 < dispatcher.policy.admission._margin + 1e-9 < 1.0


async def test_what_another_tenant_has_sent_changes_nothing_about_where_one_goes(dispatcher):
    """Routing follows what is cached, so it must know a prompt by its tenant: or a neighbour's cache could be timed."""
    for name in ("d1", "d2"):
        slow_worker(dispatcher, name)
    ids = np.arange(2000, dtype=np.int32)
    asked = GenerateRequest(CHAT, None, "", True, SamplingParams(max_tokens=16), session="talk")

    def sent(account: str, salt: bytes) -> RouteRequest:
        return _route_request(dispatcher, Prepared(asked, len(ids), ids), salt, Caller(account))

    def choice(request: RouteRequest) -> tuple:
        found = dispatcher.policy.router.choose(request, Clock.now)
        return dispatcher.policy.router.expected_cached(request), found.uncached, found.why

    before = choice(sent("mine", b"my salt"))
    for _ in range(3):
        other = sent("other", b"another salt")
        dispatcher.policy.router.commit(other, dispatcher.policy.router.choose(other, Clock.now), Clock.now)
        dispatcher.policy.router.finished(other.id)
    assert choice(sent("other", b"another salt"))[0] > 1900
    assert choice(sent("mine", b"my salt")) == before and before[0] == 0
