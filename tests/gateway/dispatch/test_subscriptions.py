"""Asking workers for their loads: soon where some are expected, seldom where not, and whatever fails, again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

from serve_app.catalog.load import load_catalog
from serve_app.gateway.dispatch import subscriptions
from serve_app.gateway.dispatch.subscriptions import Subscriptions, Wake, Wanted
from serve_app.tasks.model import ServedModel
from serve_app.wire.methods import SUBSCRIBE, WAKE, Method
from serve_app.wire.replicas import Nothing, Subscribe, Subscribed
from tests.waiting import until

CHAT = "@cf/pico/pico-instruct"


def chat(min_replicas: int = 1) -> ServedModel:
    catalog = load_catalog()
    profile = catalog[CHAT].serving["local"]
    stages = {s: getattr(profile, s).model_copy(update={"min_replicas": min_replicas}) for s in ("decode", "prefill")}
    return ServedModel(catalog[CHAT], profile.model_copy(update=stages), catalog.source(CHAT), Path("/nonexistent"))


@asynccontextmanager
async def asking(
    inbox, model: ServedModel, monkeypatch, *, fails: bool = False, period_s: float = 3600.0
) -> AsyncIterator[dict[str, list[float]]]:
    """When each stage was asked, by the loop's clock, as it goes on."""
    monkeypatch.setattr(subscriptions, "EAGER_S", 0.02)
    monkeypatch.setattr(subscriptions, "PERIOD_S", period_s)
    monkeypatch.setattr(subscriptions, "LEASE_S", 3 * period_s)
    calls: dict[str, list[float]] = {}

    async def ask_all(of: ServedModel, method: Method, call: Subscribe, stage: str) -> list[Subscribed]:
        assert of is model and method is SUBSCRIBE and call.inbox == inbox.address
        assert call.needed == {"decode": 0.5} and call.roles == {"r1": "decode"}
        assert call.lease_s == subscriptions.LEASE_S
        calls.setdefault(stage, []).append(asyncio.get_running_loop().time())
        if fails:
            raise RuntimeError("no replicas")
        return [Subscribed("r1")]

    watching = Subscriptions([model], inbox, ask_all, lambda _: Wanted({"decode": 0.5}, {"r1": "decode"}))
    watching.start()
    yield calls
    watching._task.cancel()


def each_was_asked(calls: dict[str, list[float]], times: int) -> bool:
    return set(calls) == {"decode", "prefill"} and all(len(when) >= times for when in calls.values())


async def test_both_stages_are_asked_now_and_then(inbox, monkeypatch):
    assert subscriptions.LEASE_S > 2 * subscriptions.PERIOD_S
    model = chat()
    model.ready = True
    async with asking(inbox, model, monkeypatch, period_s=0.1) as calls:
        await until(lambda: each_was_asked(calls, 3))
    assert all(later - sooner > 0.09 for when in calls.values() for sooner, later in pairwise(when))


async def test_changed_roles_are_told_at_once(inbox, monkeypatch):
    monkeypatch.setattr(subscriptions, "EAGER_S", 0.01)
    model, plan, told = chat(), Wanted(), []
    model.ready = True

    async def ask_all(of: ServedModel, method: Method, call: Subscribe, stage: str) -> list[Subscribed]:
        told.append((stage, call.roles))
        return [Subscribed("r1")]

    asking = Subscriptions([model], inbox, ask_all, lambda _: plan)
    asking.start()
    await until(lambda: len(told) == 2)
    plan = Wanted(roles={"r1": "prefill"})
    await until(lambda: len(told) == 4)
    await asyncio.sleep(0.05)
    asking._task.cancel()
    # Long before the lease is renewed, and once.
    assert sorted(told[2:]) == [("decode", {"r1": "prefill"}), ("prefill", {"r1": "prefill"})]


async def test_where_replicas_are_expected_it_asks_again_soon(inbox, monkeypatch):
    model = chat()
    model.ready = True
    async with asking(inbox, model, monkeypatch, fails=True) as calls:
        await until(lambda: each_was_asked(calls, 3))
    model = chat(min_replicas=0)
    model.ready = True
    async with asking(inbox, model, monkeypatch, fails=True) as calls:
        await until(lambda: each_was_asked(calls, 1))
        await asyncio.sleep(0.1)
    assert not each_was_asked(calls, 2)


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
    await until(lambda: told.count("decode") > 5 and listening[-1])
    asking._task.cancel()
    for task in asking._running.values():
        task.cancel()
    assert told.count("prefill") == 1 and listening[0] is False


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
    await asyncio.wait_for(told.wait(), 60)
    asking._task.cancel()


async def test_a_model_that_loads_is_left_alone(inbox, monkeypatch):
    async with asking(inbox, chat(), monkeypatch) as calls:
        await asyncio.sleep(0.1)
    assert not calls


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
    await until(lambda: all(call.done() for call in wake._calls.values()))
    wake.where_needed(model, {"prefill": 1.0, "decode": 2.0}, {"decode"})
    wake.first(model)
    await until(lambda: len(calls) == 3)
    assert calls == ["prefill", "prefill", "decode"]
