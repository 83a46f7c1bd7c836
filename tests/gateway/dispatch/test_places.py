"""Places from end to end but for the network: gateways' policies, load reports as they travel, and real schedulers."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from msgspec.structs import replace

from serve_app.channel.sender import TokenSender
from serve_app.costs.places import GAP_S, PATIENCE_S
from serve_app.engine.request import Request
from serve_app.engine.sharing import Sharing
from serve_app.gateway.dispatch.loads import worker_load
from serve_app.kv.keys import tenant_id
from serve_app.routing.dispatch import Dispatch, Effects
from serve_app.routing.types import RouteRequest
from serve_app.sampling_params import SamplingParams
from serve_app.worker.load_report import EngineLoad
from tests.engine.fake import HistoryModel, answer_alone, make_engine, random_prompt
from tests.tiny import ROOT

STEP_S = 0.05
PLACES = 4


class Cluster:
    """Two gateways before two workers, on one clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.model = HistoryModel()
        self.gateways = [Dispatch(), Dispatch()]
        self.engines = [make_engine(self.model, max_num_seqs=PLACES, num_blocks=128) for _ in range(2)]
        self.loads = []
        for number, engine in enumerate(self.engines):
            engine.scheduler.sharing = Sharing(lambda: self.now)
            self.loads.append(EngineLoad("m", "decode", "n", engine, TokenSender(f"w{number}"), deque()))
            self.loads[-1]._replica = f"w{number}"
        self.asked: dict[str, tuple[int, RouteRequest, list[int]]] = {}
        self.texts: dict[str, list[int]] = {}
        self.first: dict[str, float] = {}
        self.ended: dict[str, str] = {}
        self.report()

    def report(self) -> None:
        for number, load in enumerate(self.loads):
            told = load._measure()
            # By the clock of this test, and not by this machine's.
            told = replace(told, steps=tuple(s._replace(seconds=STEP_S) for s in told.steps), step_seconds=STEP_S)
            for gateway in self.gateways:
                self.apply(gateway.report(f"process {number}", worker_load(told, self.now), self.now))

    def ask(self, name: str, account: str, gateway: int, tokens: int = 200, **more) -> None:
        prompt = random_prompt(len(self.asked), 20)
        new = RouteRequest(name, len(prompt), max_tokens=tokens, tenant=account, arrived_at=self.now, **more)
        self.asked[name] = gateway, new, prompt
        self.gateways[gateway].elsewhere.know(tenant_id(account.encode()).hex(), account)
        self.apply(self.gateways[gateway].arrive(new, self.now))
        self.report()

    def apply(self, effects: Effects) -> None:
        for turn in effects.turns:
            name = turn.request_id
            if turn.refusal is not None:
                self.ended[name] = "refused"
                continue
            _, route, prompt = self.asked[name]
            params = SamplingParams(temperature=0.0, max_tokens=route.max_tokens, ignore_eos=True)
            new = Request(name, list(prompt), len(prompt), params, ROOT, tenant=tenant_id(route.tenant.encode()))
            new.weight = route.weight
            assert turn.decision is not None
            self.engines[int(turn.decision.decode[1:])].add(new)

    def step(self) -> None:
        self.now += STEP_S
        for engine in self.engines:
            for output in engine.step() if engine.has_work else ():
                name = output.request_id
                gateway = self.gateways[self.asked[name][0]]
                gateway.started(name, self.now)
                self.first.setdefault(name, self.now)
                self.texts.setdefault(name, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ended[name] = "done"
                    gateway.stream_ended(name)
                    self.apply(gateway.finish(name, self.now, output=len(self.texts[name])))
        self.report()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def until_ended(self, names: list[str]) -> None:
        for _ in range(3000):
            if all(name in self.ended for name in names):
                return
            self.step()
        raise AssertionError("still under way")

    def places(self) -> Counter[str]:
        of = {tenant_id(route.tenant.encode()): route.tenant for _, route, _ in self.asked.values()}
        return Counter(of[r.tenant] for engine in self.engines for r in engine.scheduler.running)

    def given(self) -> int:
        return sum(engine.scheduler.sharing.turns.given for engine in self.engines)


@pytest.fixture
async def cluster():
    made = Cluster()
    yield made
    for load in made.loads:
        load.close()
        await load._sender.aclose()


async def test_an_account_that_holds_every_place_gives_some_to_another_that_asks(cluster):
    for n in range(12):
        cluster.ask(f"a{n}", "a", gateway=n % 2)
    cluster.run(2.0)
    assert cluster.places() == {"a": 8} and len(cluster.first) == 8 and cluster.given() == 0
    # By way of a gateway that has sent none of those on one of the workers.
    asked = cluster.now
    cluster.ask("b0", "b", gateway=1, tokens=20)
    while "b0" not in cluster.first:
        cluster.step()
    assert cluster.now - asked <= PATIENCE_S + GAP_S + 4 * STEP_S
    # A deadline of a few seconds can be met for the one, and not for the other.
    cluster.until_ended(["b0"])
    cluster.ask("b1", "b", gateway=0, tokens=5, deadline=cluster.now + 3.0)
    cluster.ask("a busy", "a", gateway=0, tokens=5, deadline=cluster.now + 1.5)
    assert cluster.ended["a busy"] == "refused"
    cluster.until_ended(["b1"])
    assert cluster.ended["b1"] == "done"
    cluster.until_ended([f"a{n}" for n in range(12)])
    assert {cluster.ended[f"a{n}"] for n in range(12)} == {"done"}
    for name in ("b0", "b1", "a0", "a3", "a9"):
        _, route, prompt = cluster.asked[name]
        params = SamplingParams(temperature=0.0, max_tokens=route.max_tokens, ignore_eos=True)
        assert cluster.texts[name] == answer_alone(cluster.model, prompt, params).tokens, name


@pytest.mark.slow
@pytest.mark.parametrize(("weight", "expected"), [(1.0, 4), (3.0, 6)])
async def test_two_accounts_that_want_everything_have_their_shares_of_all_workers(cluster, weight, expected):
    for n in range(16):
        cluster.ask(f"a{n}", "a", gateway=n % 2, tokens=2000)
    cluster.run(1.0)
    for n in range(16):
        cluster.ask(f"b{n}", "b", gateway=n % 2, tokens=2000, weight=weight)
    cluster.run(3.0)
    assert cluster.places() == {"a": 8 - expected, "b": expected}
    # What is beyond its share waits in the gateways, where its order can still be chosen.
    standing = sum(len(engine.scheduler.waiting) for engine in cluster.engines)
    assert expected <= standing <= expected + 2
    before = cluster.given()
    cluster.run(1.0)
    assert cluster.given() == before
