"""The dispatcher with real policy and made-up workers: order, places and refusals."""

from __future__ import annotations

import asyncio
import random

import pytest
from msgspec.structs import replace

from serve_app.api.errors import OutOfCapacity
from serve_app.gateway.dispatch.ticket import Destination, Ticket
from serve_app.wire.generate import HERE
from tests.gateway.dispatch.waiting import IDLE, drain, entered, slow_worker, ticket


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
