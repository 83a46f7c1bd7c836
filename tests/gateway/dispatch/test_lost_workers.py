"""What survives a lost worker, a silent one and one that is replaced, with the real policy."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from serve_app.gateway.dispatch import dispatcher as dispatching
from serve_app.gateway.dispatch.ticket import Destination
from serve_app.routing.absence import SILENCE_S
from tests.gateway.dispatch.waiting import IDLE, entered, slow_worker, ticket


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
