"""One gateway's dispatch orders the requests of all: over real connections, with made-up workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from serve_app.api.errors import OutOfCapacity
from serve_app.channel import frames
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.served import gateway_name
from serve_app.gateway.dispatch import guest as guest_module
from serve_app.gateway.dispatch import owner as owner_module
from serve_app.gateway.dispatch.dispatcher import Dispatcher
from serve_app.gateway.dispatch.guest import Guests
from serve_app.gateway.dispatch.guest import _request as request_of
from serve_app.gateway.dispatch.loads import worker_load
from serve_app.gateway.dispatch.owner import Owners, entering
from serve_app.gateway.dispatch.ticket import Ticket
from serve_app.routing.types import RouteRequest
from serve_app.wire.address import InboxAddress
from serve_app.wire.load import LoadReport
from serve_app.wire.message import MessageDecoder
from serve_app.wire.turns import Pong, Visit
from tests.gateway.dispatch.waiting import CHAT, IDLE, STEPS, Clock, entered, ticket

BOUND_S = 20.0


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not holds():
            await asyncio.sleep(0.002)


@dataclass
class Gateway:
    dispatcher: Dispatcher
    inbox: TokenInbox
    owners: Owners
    guests: Guests

    @property
    def name(self) -> str:
        return gateway_name(self.inbox.address)


@dataclass
class Pair:
    """``here`` owns the dispatch, ``there`` asks it."""

    here: Gateway
    there: Gateway

    def report(self, owner: InboxAddress | None = None, **now) -> None:
        address = owner or self.here.inbox.address
        told = replace(IDLE, steps=STEPS, planner=gateway_name(address), owner=address, gateways=2, **now)
        for gateway in (self.here, self.there):
            gateway.dispatcher.report("process of d1", told)

    async def ready(self) -> None:
        """The one has reached the other."""
        await until(lambda: self.there.dispatcher._usable_owner() is not None)
        await until(lambda: self.here.guests.names() == {self.there.name})


async def gateway(model, clock) -> Gateway:
    dispatcher = Dispatcher(model, clock, lambda: gateway_name(inbox.address))
    guests = Guests(lambda name: dispatcher.desk() if name == CHAT else None)
    inbox = TokenInbox(on_visit=guests.visit)
    await inbox.start()
    owners = Owners(lambda: gateway_name(inbox.address))
    dispatcher.owner_at, dispatcher.guests = owners.at, guests.names
    return Gateway(dispatcher, inbox, owners, guests)


@pytest.fixture
async def pair(model, clock) -> AsyncIterator[Pair]:
    made = Pair(await gateway(model, clock), await gateway(model, clock))
    yield made
    for one in (made.here, made.there):
        for owner in one.owners._known.values():
            owner.close()
        await one.inbox.aclose()


def empty(dispatcher: Dispatcher) -> bool:
    return not len(dispatcher.policy) and not len(dispatcher.policy.queue) and not dispatcher._waiting


async def test_a_request_has_its_turn_from_the_owner(pair):
    pair.report()
    await pair.ready()
    one = ticket(1, 512)
    await pair.there.dispatcher.enter(one)
    assert one.decision is not None and one.decision.decode == "d1" and one.placed
    assert empty(pair.there.dispatcher) and len(pair.here.dispatcher.policy) == 1
    assert pair.here.dispatcher.policy.router.fleet.workers["d1"].own == 1
    pair.there.dispatcher.start(one)
    pair.there.dispatcher.stream_ended(one)
    await until(lambda: pair.here.dispatcher.policy.router.fleet.workers["d1"].own == 0)
    pair.there.dispatcher.finish(one, cached=0, output=16)
    await until(lambda: empty(pair.here.dispatcher))
    counts = [g.dispatcher.stats() for g in (pair.here, pair.there)]
    assert [c["placed"] for c in counts] == [0, 1]
    assert counts[0]["placed_for_others"] == counts[1]["placed_by_owner"] == 1
    assert counts[0]["owner"] == counts[1]["owner"] == pair.here.name
    # The other has learned where the prompt's K/V are, should the owner be lost.
    assert counts[0]["output_tokens"] == 16


async def test_requests_of_both_wait_in_one_queue(pair):
    pair.report(queued_tokens=4096)
    await pair.ready()
    long, short = ticket(1, 4096), ticket(2, 64)
    mine, theirs = await entered(pair.here.dispatcher, long), await entered(pair.there.dispatcher, short)
    await until(lambda: len(pair.here.dispatcher.policy) == 2)
    assert not long.placed and not short.placed
    pair.here.dispatcher._clock.now += 5.0
    pair.report()
    await until(lambda: short.placed and long.placed)
    # The shorter one has had the first turn, though it came later and to another gateway.
    assert list(pair.here.dispatcher.policy.router._reservations) == [short.request.id, long.request.id]
    await asyncio.gather(*mine, *theirs)
    pair.there.dispatcher.finish(short)
    pair.here.dispatcher.finish(long)
    await until(lambda: empty(pair.here.dispatcher))


async def test_a_refusal_comes_back_with_its_wait(pair):
    pair.report(queued_tokens=40_960)
    await pair.ready()
    hasty = ticket(1, 64, reject_if_busy=True)
    with pytest.raises(OutOfCapacity) as refused:
        await pair.there.dispatcher.enter(hasty)
    assert refused.value.retry_after > 5 and empty(pair.here.dispatcher)
    pair.there.dispatcher.finish(hasty)


async def test_a_client_that_leaves_leaves_the_owners_queue(pair):
    pair.report(queued_tokens=40_960)
    await pair.ready()
    one = ticket(1, 512)
    [task] = await entered(pair.there.dispatcher, one)
    await until(lambda: len(pair.here.dispatcher.policy.queue) == 1)
    task.cancel()
    pair.there.dispatcher.finish(one)
    await until(lambda: empty(pair.here.dispatcher))


async def test_without_the_owner_requests_go_on_where_they_came(pair):
    pair.report(queued_tokens=40_960)
    await pair.ready()
    waiting, late = ticket(1, 512), ticket(2, 512)
    tasks = await entered(pair.there.dispatcher, waiting)
    await until(lambda: len(pair.here.dispatcher.policy.queue) == 1)
    await pair.here.inbox.aclose()
    await until(lambda: len(pair.there.dispatcher.policy.queue) == 1)
    # What the owner had of others is nobody's any more.
    await until(lambda: empty(pair.here.dispatcher) and not pair.here.guests.names())
    tasks += await entered(pair.there.dispatcher, late)
    for _ in range(2):
        pair.there.dispatcher._clock.now += 5.0
        pair.report()
    await until(lambda: all(task.done() for task in tasks))
    assert waiting.placed and late.placed and waiting.owner is late.owner is None
    for one in (waiting, late):
        pair.there.dispatcher.finish(one)
    assert empty(pair.there.dispatcher)


async def test_a_stream_notices_neither_the_owners_end_nor_its_own_move(pair):
    pair.report()
    await pair.ready()
    one, other = ticket(1, 33), ticket(2, 33)
    for each in (one, other):
        async with asyncio.timeout(BOUND_S):
            await pair.there.dispatcher.enter(each)
        pair.there.dispatcher.start(each)
    # Its worker is lost: another is chosen here, and the owner forgets it.
    pair.there.dispatcher.report("process of d2", replace(IDLE, replica="d2"))
    await pair.there.dispatcher.move(one, one.decision)
    assert one.decision.decode == "d2" and one.owner is None
    await until(lambda: len(pair.here.dispatcher.policy) == 1)
    await pair.here.inbox.aclose()
    for each in (one, other):
        pair.there.dispatcher.stream_ended(each)
        pair.there.dispatcher.finish(each, output=16)
    await until(lambda: empty(pair.here.dispatcher))
    assert empty(pair.there.dispatcher) and pair.there.dispatcher.policy.router.reserved == 0


async def test_an_owner_that_says_nothing_is_done_without(pair, monkeypatch):
    monkeypatch.setattr(owner_module, "FIRST_WORD_S", 0.02)
    held: list[object] = []  # since Python 3.13 a connection ends with the last reference to its writer

    def answer(_, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        writer.write(frames.encode(Pong()))

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    pair.report(InboxAddress(host, port, b"secret"))
    await until(lambda: pair.there.dispatcher._usable_owner() is not None)
    one: Ticket = ticket(1, 512)
    async with asyncio.timeout(BOUND_S):
        await pair.there.dispatcher.enter(one)
    assert one.placed and one.owner is None and len(pair.there.dispatcher.policy) == 1
    # For a while nobody else tries.
    assert pair.there.dispatcher._usable_owner() is None
    pair.there.dispatcher.finish(one)
    server.close()


async def test_most_workers_say_who_owns(model, clock: Clock):
    one = await gateway(model, clock)
    here, gone = InboxAddress("h", 1, b"s"), InboxAddress("h", 2, b"s")
    for process, owner in (("p1", gone), ("p2", here), ("p3", here), ("p1", here)):
        one.dispatcher.report(process, replace(IDLE, replica=process, planner=gateway_name(owner), owner=owner))
    assert one.dispatcher._owner == here
    for process in ("p1", "p2"):
        one.dispatcher.report(process, replace(IDLE, replica=process, planner=one.name, owner=one.inbox.address))
    assert one.dispatcher._owner is None
    await one.inbox.aclose()


async def test_who_has_no_secret_is_hung_up_on(pair):
    pair.report()
    wrong = replace(pair.here.inbox.address, secret=b"another")
    pair.report(wrong)
    assert not pair.there.dispatcher._usable_owner()
    await asyncio.sleep(0.05)
    assert not pair.here.guests.names()


async def test_nobody_waits_for_an_owner_that_has_never_said_a_word(pair):
    """The kernel of a process that is stopped takes connections."""
    connected: asyncio.Queue[object] = asyncio.Queue()
    server = await asyncio.start_server(lambda *streams: connected.put_nowait(streams), "127.0.0.1", 0)
    silent = InboxAddress(*server.sockets[0].getsockname(), b"secret")
    pair.report(silent)
    assert pair.there.dispatcher._usable_owner() is None
    owner = pair.there.owners.at(silent)
    held = await connected.get()
    await until(lambda: owner._line is not None)
    assert pair.there.dispatcher._usable_owner() is None and held
    server.close()


async def test_all_places_of_a_lost_gateway_are_free_again(pair):
    pair.report()
    await pair.ready()
    placed, *others = [ticket(1, 64)] + [ticket(n, 4096, deadline=Clock.now + 500.0) for n in (2, 3, 4)]
    async with asyncio.timeout(BOUND_S):
        await pair.there.dispatcher.enter(placed)
    pair.report(queued_tokens=40_960)
    tasks = await entered(pair.there.dispatcher, *others)
    await until(lambda: len(pair.here.dispatcher.policy) == 4)
    # Its end has the next ones refused, which are the lost gateway's as well.
    pair.here.dispatcher._clock.now += 1000.0
    [guest] = pair.here.guests._here
    guest.line.close()
    assert empty(pair.here.dispatcher) and not pair.here.guests.names()
    assert pair.here.dispatcher.policy.router.reserved == 0
    for one in (placed, *others):
        pair.there.dispatcher.finish(one)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_gateway_that_stands_still_keeps_no_places(pair, monkeypatch):
    monkeypatch.setattr(guest_module, "LOOK_S", 0.01)
    pair.report()
    _, writer = await asyncio.open_connection(pair.here.inbox.address.host, pair.here.inbox.address.port)
    request = ticket(1, 512).request
    for message in (Visit(pair.here.inbox.address.secret, "stopped"), entering(CHAT, request, "", Clock.now)):
        writer.write(frames.encode(message))
    await until(lambda: pair.here.dispatcher.stats()["placed_for_others"] == 1)
    # Its kernel still holds the connection.
    await until(lambda: empty(pair.here.dispatcher) and not pair.here.guests.names())
    writer.close()


async def test_an_owner_that_hears_of_no_worker_gives_no_turns(pair, monkeypatch):
    monkeypatch.setattr(owner_module, "FIRST_WORD_S", 0.02)
    pair.report()
    await pair.ready()
    pair.here.dispatcher.lost("process of d1")
    one = ticket(1, 512)
    async with asyncio.timeout(BOUND_S):
        await pair.there.dispatcher.enter(one)
    assert one.decision is not None and one.owner is None
    pair.there.dispatcher.finish(one)
    assert empty(pair.here.dispatcher) and empty(pair.there.dispatcher)


async def test_a_connection_that_is_tried_is_not_forgotten(pair):
    first, second = pair.here.inbox.address, pair.there.inbox.address
    owners = Owners(lambda: "a third")
    found = [owners.at(address) for address in (first, second) if not owners.at(address).usable]
    assert [owners.at(first), owners.at(second)] == found
    await until(lambda: all(owner.usable for owner in found))
    for owner in found:
        owner.close()


async def test_workers_that_are_gone_have_no_say_in_who_owns(model, clock: Clock):
    one = await gateway(model, clock)
    here, gone = InboxAddress("h", 1, b"s"), InboxAddress("h", 2, b"s")
    for process, owner in (("p1", gone), ("p2", gone), ("p3", here)):
        one.dispatcher.report(process, replace(IDLE, replica=process, planner=gateway_name(owner), owner=owner))
    assert one.dispatcher._owner == gone
    for process in ("p1", "p2"):
        one.dispatcher.lost(process)
    assert one.dispatcher._owner == here
    one.dispatcher.lost("p3")
    assert one.dispatcher._owner is None
    await one.inbox.aclose()


async def test_an_estimate_is_by_the_queue_that_the_request_would_stand_in(pair):
    pair.report()
    await pair.ready()
    assert (await pair.there.dispatcher.foresee(ticket(1, 64).request)).wait_s < 1
    pair.report(queued_tokens=4096)
    waiting = [ticket(n, 4096) for n in (2, 3, 4)]
    tasks = await entered(pair.here.dispatcher, *waiting)
    asked = ticket(5, 4096)
    seen = [await gateway.dispatcher.foresee(asked.request) for gateway in (pair.here, pair.there)]
    assert seen[0] == seen[1] and seen[1].wait_s > 8
    # Nobody has come by it.
    assert len(pair.here.dispatcher.policy) == 3 and empty(pair.there.dispatcher)
    # Without the owner it is by what this gateway knows.
    await pair.here.inbox.aclose()
    await until(lambda: pair.there.dispatcher._usable_owner() is None)
    assert 0 < (await pair.there.dispatcher.foresee(asked.request)).wait_s < seen[1].wait_s
    for one, task in zip(waiting, tasks, strict=True):
        task.cancel()
        pair.here.dispatcher.finish(one)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_owner_that_does_not_say_what_it_foresees_is_done_without(pair, monkeypatch):
    monkeypatch.setattr(owner_module, "FIRST_WORD_S", 0.02)
    pair.report()
    await pair.ready()
    pair.here.dispatcher.lost("process of d1")
    assert (await pair.there.dispatcher.foresee(ticket(1, 64).request)).wait_s is not None


def test_zones_travel_with_requests_and_reports():
    request = RouteRequest("r", 100, zone="eu/a")
    assert request_of(entering(CHAT, request, "", 0.0), 0.0).zone == "eu/a"
    report = LoadReport("replica", CHAT, "decode", "decode", "n1", zone="eu/b")
    assert worker_load(MessageDecoder(LoadReport)(report.encode()), 0.0).zone == "eu/b"
