"""Load reports over real sockets: who gets them, how often, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from serve_app.channel import frames
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.reporter import LoadReporter
from serve_app.channel.sender import TokenSender
from serve_app.wire.load import Fetch, LoadReport, Step
from serve_app.wire.message import BadMessage
from serve_app.wire.tokens import TokenItem, read_from_worker
from tests.channel.test_channel import hang_up
from tests.waiting import until

IDLE = LoadReport("replica-1", "@cf/pico/pico-instruct", "decode", "decode", "node-1", max_seqs=8, total_blocks=100)


class Gateway:
    """An inbox that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[LoadReport | None] = []
        self.inbox = TokenInbox(on_load=lambda worker, report: self.told.append(report))


@pytest.fixture
async def gateways():
    both = Gateway(), Gateway()
    for gateway in both:
        await gateway.inbox.start()
    yield both
    for gateway in both:
        await gateway.inbox.aclose()


class Worker:
    def __init__(self, **options) -> None:
        self.now = IDLE
        self.sender = TokenSender("worker-1")
        self.reporter = LoadReporter(self.sender, lambda: self.now, **options)

    def becomes(self, **changes) -> None:
        self.now = replace(self.now, **changes)
        self.reporter.changed()


@pytest.fixture
async def worker():
    worker = Worker(period_s=0.02, heartbeat_s=30)
    yield worker
    worker.reporter.close()
    await worker.sender.aclose()


async def test_every_subscriber_hears_at_once_and_of_every_change(gateways, worker):
    for gateway in gateways:
        worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: all(g.told for g in gateways))
    worker.becomes(queued_tokens=7, waiting=1)
    await until(lambda: all(g.told[-1].queued_tokens == 7 for g in gateways))
    # A busy worker looks again by itself: a long prompt makes progress without making a token.
    worker.now = replace(worker.now, queued_tokens=3)
    await until(lambda: all(g.told[-1].queued_tokens == 3 for g in gateways))
    assert [g.told[0] for g in gateways] == [IDLE, IDLE]


async def test_many_changes_are_few_frames_and_the_last_one_counts(gateways, worker):
    gateway = gateways[0]
    worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: gateway.told)
    for n in range(1, 1001):
        worker.becomes(running=n)
        if n % 100 == 0:
            await asyncio.sleep(0.001)
    await until(lambda: gateway.told[-1].running == 1000)
    assert len(gateway.told) < 100


async def test_nothing_new_is_not_sent_again(gateways):
    worker = Worker(period_s=0.0, heartbeat_s=3600.0)
    gateway = gateways[0]
    worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: gateway.told)
    sent = []
    worker.sender.report = lambda load, report=worker.sender.report: (sent.append(load), report(load))
    for _ in range(20):
        worker.becomes(step_seconds=0.001 * len(sent) + 0.001)  # times alone are no news
        await asyncio.sleep(0)
    assert sent == []
    worker.reporter.close()
    await worker.sender.aclose()


async def test_it_is_sent_again_as_a_heartbeat(gateways):
    worker = Worker(period_s=0.0, heartbeat_s=0.05)
    gateway = gateways[0]
    worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: len(gateway.told) >= 3)
    worker.reporter.close()
    await worker.sender.aclose()


async def test_the_lease_ends_and_subscribing_twice_is_the_same_as_once(gateways, worker):
    gateway = gateways[0]
    for _ in range(3):
        worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: gateway.told)
    assert worker.sender.subscribers == 1 and gateway.inbox.workers == ["worker-1"]
    worker.reporter.subscribe(gateway.inbox.address, 0)
    assert worker.sender.subscribers == 0
    heard = len(gateway.told)
    worker.becomes(running=3)
    stream = gateway.inbox.open_stream("s")
    worker.sender.open("s", gateway.inbox.address)
    worker.sender.send([TokenItem("s", 0, (1,), "stop")])
    assert [item.ids async for item in stream] == [(1,)]  # by then a report would have come as well
    assert len(gateway.told) == heard


async def test_a_broken_connection_is_told_and_mended_without_streams(gateways, worker):
    gateway = gateways[0]
    worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: gateway.told)
    hang_up(gateway.inbox)
    await until(lambda: None in gateway.told)
    worker.becomes(running=2)
    await until(lambda: gateway.told[-1] is not None and gateway.told[-1].running == 2)


async def test_a_stream_that_is_left_before_its_first_token_is_closed_at_the_replica_that_was_asked(gateways, worker):
    gateway, left = gateways[0], []
    worker.sender._on_closed = left.append
    worker.reporter.subscribe(gateway.inbox.address, 30)
    await until(lambda: gateway.told)
    for name, replica in (("asked", IDLE.replica), ("elsewhere", "replica-2"), ("anywhere", "")):
        worker.sender.open(name, gateway.inbox.address)
        gateway.inbox.open_stream(name, replica=replica).close()
    await until(lambda: left)
    worker.sender.send([TokenItem("elsewhere", 0, (1,)), TokenItem("anywhere", 0, (1,))])
    await until(lambda: len(left) == 3)
    assert left[0] == "asked"


async def test_a_gateway_that_is_gone_is_forgotten_with_its_lease(gateways, worker):
    address = gateways[0].inbox.address
    worker.reporter.subscribe(address, 0.2)
    await until(lambda: gateways[0].told)
    await gateways[0].inbox.aclose()
    await until(lambda: not worker.sender._connections)


@pytest.mark.parametrize(
    "change",
    [
        {"replica": 5},
        {"model": "x" * 1000},
        {"running": -1},
        {"running": True},
        {"queued_tokens": 1 << 60},
        {"step_seconds": float("nan")},
        {"step_seconds": "fast"},
        {"steps": ((1, 2, 3),)},
        {"steps": ((1, 2, 3, 4, float("inf")),)},
        {"steps": ((1, 2, 3, 4, 0.1),) * 1000},
        {"fetches": ((1, 2, 0.1),)},
    ],
)
def test_what_is_no_report_is_refused(change):
    full = replace(IDLE, steps=(Step(512, 0, 3, 900, 0.25),), fetches=(Fetch("node", 256, 0.003),))
    assert read_from_worker(full.encode()) == full
    with pytest.raises(BadMessage):
        read_from_worker(replace(IDLE, **change).encode())


async def test_a_report_without_the_secret_closes_the_connection(gateways):
    gateway = gateways[0]
    address = gateway.inbox.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(frames.encode(IDLE))
    assert await reader.read() == b""
    assert gateway.told == []
    writer.close()
