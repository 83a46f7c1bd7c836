"""A worker that drains gets nothing new, and ends what it has."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from tests.gateway.dispatch.waiting import IDLE, entered, slow_worker, ticket


def leaves(dispatcher, name: str = "d1") -> None:
    dispatcher.report(f"process of {name}", replace(IDLE, replica=name, leaving=True))


async def test_requests_go_elsewhere_and_streams_stay(dispatcher):
    slow_worker(dispatcher)
    staying = ticket(1, 64)
    await dispatcher.enter(staying)
    dispatcher.start(staying)
    slow_worker(dispatcher, "d2")
    leaves(dispatcher)
    assert not dispatcher.gone(staying)
    for number in range(2, 10):
        one = ticket(number, 64)
        await dispatcher.enter(one)
        assert one.decision.decode == "d2"
        dispatcher.finish(one, output=1)
    assert [worker["replica"] for worker in dispatcher.stats()["workers"]] == ["d2"]
    # A later report does not bring it back; only the end of its connection ends its streams.
    leaves(dispatcher)
    assert not dispatcher.gone(staying)
    dispatcher.lost("process of d1")
    assert dispatcher.gone(staying) and not dispatcher.policy.workers.leaving
    dispatcher.finish(staying)


async def test_where_the_last_one_leaves_requests_wait_for_the_next(dispatcher):
    dispatcher.expect_reports()
    slow_worker(dispatcher)
    leaves(dispatcher)
    waiting = ticket(1, 64)
    tasks = await entered(dispatcher, waiting)
    await asyncio.sleep(0.02)
    assert not waiting.placed
    slow_worker(dispatcher, "d2")
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert waiting.decision.decode == "d2"
    dispatcher.finish(waiting)
