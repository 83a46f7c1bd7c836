"""Two gateways share fairly between tenants what the workers serve by way of both."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from serve_app.channel.inbox import TokenInbox
from serve_app.channel.reporter import LoadReporter
from serve_app.channel.sender import TokenSender
from serve_app.channel.served import RECENT_S, ServedLedger, gateway_name
from serve_app.gateway.dispatch.loads import served_elsewhere
from serve_app.routing.fairness import FairConfig, FairQueue
from serve_app.routing.served import ServedElsewhere
from serve_app.routing.types import RouteRequest
from serve_app.wire.load import MAX_SERVED, LoadReport
from serve_app.wire.tokens import read_from_worker
from tests.waiting import until

IDLE = LoadReport("replica-1", "@cf/pico/pico-instruct", "decode", "decode", "node-1")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gateway:
    """A gateway's queue, and its ears."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.queue = FairQueue(FairConfig(slack=0.0))
        self.elsewhere = ServedElsewhere(self.queue.charge)
        for tenant in ("light", "hostile"):
            self.elsewhere.know(tenant, tenant)

    def hear(self, report: LoadReport, process: str = "p") -> None:
        self.elsewhere.take(process, served_elsewhere(report, {self.name}))

    def push(self, tenant: str, number: int) -> None:
        self.queue.push(RouteRequest(f"{tenant}{number}", 100, tenant=tenant, max_tokens=50))

    def turn(self, ledger: ServedLedger) -> str:
        """The next request is served at once, as a worker would count it."""
        request = self.queue.heads(1)[0]
        self.queue.take(request.id)
        ledger.add(self.name, request.tenant, request.priority, uncached=100, output=50)
        self.queue.settle(request.id, 100, 0, 50)
        return request.tenant


def report(ledger: ServedLedger) -> LoadReport:
    return read_from_worker(replace(IDLE, served=ledger.recent()).encode())


@pytest.mark.parametrize("told", [True, False])
def test_a_tenant_at_two_gateways_has_one_share(told: bool) -> None:
    """Hostile has requests at both gateways, light at one of them. Each gateway serves as fast as the other."""
    ledger = ServedLedger(Clock())
    gateways = [Gateway("g1"), Gateway("g2")]
    served = {"light": 0, "hostile": 0}
    for gateway in gateways:
        gateway.hear(report(ledger), "p")
    for number in range(200):
        gateways[0].push("light", number)
        for gateway in gateways:
            gateway.push("hostile", number)
    for _ in range(120):
        for gateway in gateways:
            served[gateway.turn(ledger)] += 1
            if told:
                for other in gateways:
                    other.hear(report(ledger), "p")
    # The second gateway has nobody but hostile: half of all is what it gets in any case.
    assert served["light"] == (pytest.approx(120, abs=2) if told else pytest.approx(60, abs=2))


def test_reports_that_are_lost_or_come_twice_change_nothing() -> None:
    ledger = ServedLedger(Clock())
    every, some = Gateway("g1"), Gateway("g1")
    for gateway in (every, some):
        gateway.hear(report(ledger), "p")
    for number in range(30):
        ledger.add("g2", "light", "realtime", uncached=number, cached=3, output=2)
        ledger.add("g1", "light", "realtime", output=1000)  # its own: counted when it was served
        ledger.add("g2", "stranger", "realtime", output=7)
        for _ in range(2):
            every.hear(report(ledger))
        if number % 7 == 1:
            some.hear(report(ledger), "p")
    some.hear(report(ledger), "p")
    counted = every.queue.counters()
    assert counted == pytest.approx(some.queue.counters()) and set(counted) == {"light"}
    cost = every.queue.config
    tokens = sum(range(30)) * cost.uncached_weight + 90 * cost.cached_weight + 60 * cost.output_weight
    assert counted["light"] == pytest.approx(tokens)


def test_what_was_served_before_a_gateway_came_up_is_not_charged_and_a_new_process_counts_anew() -> None:
    ledger = ServedLedger(Clock())
    ledger.add("g2", "light", "realtime", output=500)
    gateway = Gateway("g1")
    gateway.hear(report(ledger), "p")
    assert gateway.queue.counters() == {}
    ledger.add("g2", "light", "realtime", output=1)
    gateway.hear(report(ledger), "p")
    charged = gateway.queue.counters()["light"]
    assert charged == gateway.queue.config.output_weight
    gateway.elsewhere.lost("p")
    again = ServedLedger(Clock())
    gateway.hear(report(again), "q")
    again.add("g2", "light", "realtime", output=1)
    gateway.hear(report(again), "q")
    assert gateway.queue.counters()["light"] == 2 * charged


def test_a_count_that_rested_starts_anew_and_is_charged_whole() -> None:
    clock = Clock()
    ledger, gateway = ServedLedger(clock), Gateway("g1")
    gateway.hear(report(ledger), "p")
    for output in (100, 150):
        ledger.add("g2", "light", "realtime", output=output)
        gateway.hear(report(ledger), "p")
        clock.now += RECENT_S + 1
        assert ledger.recent() == ()
        gateway.hear(report(ledger), "p")
    assert gateway.queue.counters()["light"] == 250 * gateway.queue.config.output_weight


def test_a_report_names_those_served_last() -> None:
    clock = Clock()
    ledger = ServedLedger(clock)
    for number in range(3 * MAX_SERVED):
        clock.now += 1e-3
        ledger.add("g2", f"t{number}", "batch", output=1)
    named = {entry[2] for entry in report(ledger).served}
    assert named == {f"t{number}" for number in range(2 * MAX_SERVED, 3 * MAX_SERVED)}


async def test_it_travels_with_load_reports_over_the_token_channel() -> None:
    ledger, gateways = ServedLedger(), [Gateway(), Gateway()]
    inboxes = [TokenInbox(on_load=_listen(gateway)) for gateway in gateways]
    for gateway, inbox in zip(gateways, inboxes, strict=True):
        await inbox.start()
        gateway.name = gateway_name(inbox.address)
    sender = TokenSender("worker-1")
    now = IDLE
    reporter = LoadReporter(sender, lambda: replace(now, served=ledger.recent()), period_s=0.01)
    try:
        for inbox in inboxes:
            reporter.subscribe(inbox.address, 30)
        await until(lambda: all(len(inbox.workers) == 1 for inbox in inboxes))
        await asyncio.sleep(0.05)  # their first reports have come
        ledger.add(gateways[0].name, "hostile", "realtime", uncached=40, output=5)
        now = replace(now, running=1)
        reporter.changed()
        await until(lambda: "hostile" in gateways[1].queue.counters())
        cost = gateways[1].queue.config
        assert gateways[1].queue.counters()["hostile"] == 40 * cost.uncached_weight + 5 * cost.output_weight
        assert gateways[0].queue.counters() == {}
    finally:
        reporter.close()
        await sender.aclose()
        for inbox in inboxes:
            await inbox.aclose()


def _listen(gateway: Gateway):
    def told(process: str, load: LoadReport | None) -> None:
        if load is not None:
            gateway.hear(load, process)

    return told
