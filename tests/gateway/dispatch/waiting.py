"""Requests that enter a dispatcher, and workers that are made up."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.gateway.dispatch.ticket import Ticket
from serve_app.routing.types import RouteRequest
from serve_app.state.kept.traces import Trace
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
