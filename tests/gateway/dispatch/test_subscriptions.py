"""Asking workers for their loads: soon where some are expected, seldom where not, and whatever fails, again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from serve_app.catalog.load import load_catalog
from serve_app.channel.inbox import TokenInbox
from serve_app.gateway.dispatch import subscriptions
from serve_app.gateway.dispatch.subscriptions import Subscriptions, Wake, Wanted
from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import SUBSCRIBE, WAKE, Method
from serve_app.wire.replicas import Nothing, Subscribe, Subscribed

CHAT = "@cf/pico/pico-instruct"


@pytest.fixture
async def inbox():
    inbox = TokenInbox()
    await inbox.start()
    yield inbox
    await inbox.aclose()


def chat(min_replicas: int = 1) -> ServedModel:
    catalog = load_catalog()
    profile = catalog[CHAT].serving["local"]
    stages = {s: getattr(profile, s).model_copy(update={"min_replicas": min_replicas}) for s in ("decode", "prefill")}
    return ServedModel(catalog[CHAT], profile.model_copy(update=stages), catalog.source(CHAT), Path("/nonexistent"))


async def asked(inbox, model: ServedModel, monkeypatch, fails: bool, seconds: float = 0.4) -> Counter:
    monkeypatch.setattr(subscriptions, "EAGER_S", 0.02)
    monkeypatch.setattr(subscriptions, "PERIOD_S", 0.2)
    calls: Counter[str] = Counter()

    async def ask_all(of: ServedModel, method: Method, call: Subscribe, stage: str) -> list[Subscribed]:
        assert of is model and method is SUBSCRIBE and call.inbox == inbox.address
        assert call.needed == {"decode": 0.5} and call.roles == {"r1": "decode"}
        assert call.lease_s > 2 * subscriptions.PERIOD_S
        calls[stage] += 1
        if fails:
            raise RuntimeError("no replicas")
        return [Subscribed("r1")]

    asking = Subscriptions([model], inbox, ask_all, lambda _: Wanted({"decode": 0.5}, {"r1": "decode"}))
    asking.start()
    await asyncio.sleep(seconds)
    asking._task.cancel()
    return calls


async def test_both_stages_are_asked_now_and_then(inbox, monkeypatch):
    model = chat()
    model.ready = True
    calls = await asked(inbox, model, monkeypatch, fails=False)
    assert set(calls) == {"decode", "prefill"} and all(1 <= count <= 4 for count in calls.values())


async def test_changed_roles_are_told_at_once(inbox, monkeypatch):
    monkeypatch.setattr(subscriptions, "EAGER_S", 0.01)
    model, plan, told = chat(), Wanted(), []
    model.ready = True

    async def ask_all(of: ServedModel, method: Method, call: Subscribe, stage: str) -> list[Subscribed]:
        told.append((stage, call.roles))
        return [Subscribed("r1")]

    asking = Subscriptions([model], inbox, ask_all, lambda _: plan)
    asking.start()
    await asyncio.sleep(0.1)
    assert len(told) == 2
    plan = Wanted(roles={"r1": "prefill"})
    await asyncio.sleep(0.1)
    asking._task.cancel()
    # Long before the lease is renewed, and once.
    assert sorted(told[2:]) == [("decode", {"r1": "prefill"}), ("prefill", {"r1": "prefill"})]


async def test_where_replicas_are_expected_it_asks_again_soon(inbox, monkeypatch):
    model = chat()
    model.ready = True
    eager = await asked(inbox, model, monkeypatch, fails=True)
    model = chat(min_replicas=0)
    model.ready = True
    patient = await asked(inbox, model, monkeypatch, fails=True)
    assert min(eager.values()) > max(patient.values()) >= 1


async def test_a_stage_that_reports_nothing_is_asked_again_soon_and_a_stuck_one_holds_up_nobody(inbox, monkeypatch):
    monkeypatch.setattr(subscriptions, "EAGER_S", 0.01)
    model, told, listening = chat(), [], []
    model.ready = True

    async def ask_all(of: ServedModel, method: Method, call: Subscribe, stage: str) -> list[Subscribed]:
        told.append(stage)
        if stage == "prefill":
            await asyncio.sleep(3600)
        return [Subscribed("r1", len(told) > 4)]

    plan = Wanted(silent=frozenset({"decode"}))
    asking = Subscriptions([model], inbox, ask_all, lambda _: plan, lambda _, listens: listening.append(listens))
    asking.start()
    await asyncio.sleep(0.3)
    asking._task.cancel()
    for task in asking._running.values():
        task.cancel()
    assert told.count("prefill") == 1 and told.count("decode") > 5
    assert listening[0] is False and listening[-1] is True


async def test_a_request_that_waits_for_a_report_hurries_it(inbox, monkeypatch):
    monkeypatch.setattr(subscriptions, "EAGER_S", 30.0)
    model, told = chat(), asyncio.Event()

    async def ask_all(of: ServedModel, method: Method, call: Subscribe, stage: str) -> list[Subscribed]:
        told.set()
        return [Subscribed("r1")]

    asking = Subscriptions([model], inbox, ask_all, lambda _: Wanted())
    asking.start()
    await asyncio.sleep(0.05)
    model.ready = True
    assert not told.is_set()
    asking.hurry()
    await asyncio.wait_for(told.wait(), 5)
    asking._task.cancel()


async def test_a_model_that_loads_is_left_alone(inbox, monkeypatch):
    assert not await asked(inbox, chat(), monkeypatch, fails=False, seconds=0.1)


async def test_a_stage_without_workers_is_woken_once_and_again_if_that_fails():
    model, calls, gate = chat(0), [], asyncio.Event()

    async def call(of: ServedModel, method: Method, message: Nothing, stage: str) -> Nothing:
        assert method is WAKE
        calls.append(stage)
        await gate.wait()
        raise RuntimeError("it did not start")

    wake = Wake(call)
    wake.where_needed(model, {"prefill": 0.01, "decode": 2.0}, {"decode"})  # hardly any need
    wake.where_needed(model, {"prefill": 1.0, "decode": 2.0}, set())  # nobody has reported: decode comes first
    await asyncio.sleep(0)
    assert calls == []
    for _ in range(3):
        wake.where_needed(model, {"prefill": 1.0, "decode": 2.0}, {"decode"})
        await asyncio.sleep(0)
    assert calls == ["prefill"]
    gate.set()
    await asyncio.sleep(0.01)
    wake.where_needed(model, {"prefill": 1.0, "decode": 2.0}, {"decode"})
    wake.first(model)
    await asyncio.sleep(0.01)
    assert calls == ["prefill", "prefill", "decode"]
