"""Which processes live: what one that has ended had leased comes back, with what it wrote down in the ledger first."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.api.errors import BudgetSpent
from serve_app.state import state as module
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import MICRO, Limits
from serve_app.state.owners import Owner
from serve_app.state.spending.allowance import Worst
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.quotas import NEURONS
from tests.state.gateways import Gateways

WHO = Caller("team-a", key="k1", account_limits=Limits(neurons_per_day=1000 * MICRO))


def test_one_that_has_ended_is_seen_by_one_at_a_time(tmp_path):
    one, two, three = (Owner(tmp_path / "gateways") for _ in range(3))
    with one.ended() as ended:
        assert ended == []
    for owner in (one, two, three):
        owner.live()
    two.close()
    with one.ended() as ended:
        assert ended == [two.id]
        with three.ended() as others:
            assert others == []
    # Until somebody has looked after it.
    with three.ended() as ended:
        assert ended == [two.id]
        three.forget(two.id)
    with one.ended() as ended:
        assert ended == []
    one.end()
    three.end()
    assert {path.name for path in (tmp_path / "gateways").iterdir()} == {"lock"}


async def test_what_a_dead_gateway_had_leased_comes_back_when_its_journal_is_settled(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ADOPT_S", 0.05)
    with Gateways(f"sqlite:///{tmp_path / 'shared.sqlite3'}", tmp_path) as gateways:
        one, two = gateways.make("node"), gateways.make("node")
        await two.start()
        first = await one.allowance.reserve(WHO, Worst(neurons=300 * MICRO))
        # One answer is in its journal and nowhere else when it dies, over another.
        entry = Entry("r1", "team-a", "k1", _now(), 1.0, "m", "t", "done", {}, 250 * MICRO, 0, "USD")
        await one.ledger.enter(entry)
        first.settle({NEURONS: 250 * MICRO}, "r1")
        await one.allowance.reserve(WHO, Worst(neurons=700 * MICRO))
        with pytest.raises(BudgetSpent):
            await two.allowance.reserve(WHO, Worst(neurons=100 * MICRO))
        _die(one)
        async with asyncio.timeout(60):
            while True:
                try:
                    whole = await two.allowance.reserve(WHO, Worst(neurons=750 * MICRO))
                    break
                except BudgetSpent:
                    await asyncio.sleep(0.1)
        whole.settle({})
        with pytest.raises(BudgetSpent, match="of which 750 is left"):
            await two.allowance.reserve(WHO, Worst(neurons=751 * MICRO))


def _now() -> float:
    return module.time.time()


def _die(gateway: module.State) -> None:
    """As its process would: threads stop where they are, files are closed."""
    gateway.allowance._background.end()
    gateway.ledger.finish()
    for segment in gateway.ledger._segments:
        segment.journal.close()
    gateway._owner.close()
