"""Targets, deadlines, models at zero and late first tokens, with the real policy and made-up workers."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import GenerateRequest
from serve_app.gateway.backends.engine import _route_request
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.gateway.dispatch.ticket import Destination, Ticket
from serve_app.routing.types import RouteRequest
from serve_app.sampling_params import SamplingParams
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.backend import Prepared
from serve_app.text.prompt import Prompt
from serve_app.wire.generate import HERE
from tests.gateway.dispatch.waiting import CHAT, IDLE, Clock, drain, entered, slow_worker, ticket


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
        return _route_request(dispatcher, Prepared(asked, len(ids), Prompt(ids)), salt, Caller(account), "eu/a")

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
