"""What callers may do: refusals with their codes, headers and remedies, and what the store's absence changes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import serve_app.state.spending.allowance as allowance_module
from serve_app.api.errors import BudgetSpent, PaidPlanNeeded, RateLimited, StoreAway
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import FREE_NEURONS, MICRO, NANO, Limits, read_limits
from serve_app.state.errors import Away
from serve_app.state.owners import Owner
from serve_app.state.spending.allowance import Allowance, Worst
from serve_app.state.spending.quotas import NEURONS, TOKENS, Quota

NOON = 1_795_262_430.0  # 12:00:30 UTC


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now, self.began = now, time.monotonic()

    def __call__(self) -> float:
        return self.now + time.monotonic() - self.began


@pytest.fixture
def allowing(store, tmp_path):
    """``allowing(...)``: the limits as a gateway on ``store`` applies them."""
    made = []

    def make(**options) -> Allowance:
        made.append(Allowance(store.leases, Owner(tmp_path / "gateways"), **{"clock": Clock(), **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def caller(key: Limits | None = None, **limits) -> Caller:
    return Caller("team-a", key="k1", account_limits=Limits(**limits), limits=key or Limits())


async def test_requests_of_a_minute(allowing):
    allowance = allowing(by_task={"text-generation": 2})
    first = await allowance.request(caller(), "text-generation")
    assert first["Ratelimit"].startswith('"text-generation";r=1;t=') and first["Ratelimit-Policy"] == (
        '"text-generation";q=2;w=60'
    )
    await allowance.request(caller(), "text-generation")
    with pytest.raises(RateLimited) as caught:
        await allowance.request(caller(), "text-generation")
    error = caught.value
    assert (error.code, error.status) == (971, 429) and 1 <= int(error.headers["Retry-After"]) <= 30
    assert error.headers["Ratelimit"].startswith('"text-generation";r=0;t=')
    # Another account has its own count, another task none at all.
    assert ";r=1;" in (await allowance.request(Caller("team-b"), "text-generation"))["Ratelimit"]
    assert await allowance.request(caller(), "reranking") == {}


async def test_limits_of_account_and_key_are_told_together(allowing):
    allowance = allowing()
    told = await allowance.request(caller(Limits(requests_per_minute=3), requests_per_minute=5), "reranking")
    assert told["Ratelimit-Policy"] == '"account";q=5;w=60, "key";q=3;w=60'
    assert '"account";r=4;t=' in told["Ratelimit"] and '"key";r=2;t=' in told["Ratelimit"]


async def test_tokens_of_a_minute(allowing):
    allowance, one = allowing(), caller(tokens_per_minute=100)
    running = await allowance.reserve(one, Worst(tokens=80, because="30 prompt tokens, max_tokens 50"))
    with pytest.raises(RateLimited, match=r"100 tokens.*of which 20 are left.*up to 50 \(") as e:
        await allowance.reserve(one, Worst(tokens=50, because="20 prompt tokens, max_tokens 30"))
    assert e.value.code == 971 and "try again in" in e.value.message
    running.settle({TOKENS: 30})
    (await allowance.reserve(one, Worst(tokens=70))).settle({TOKENS: 0})
    # What can never fit is not asked to come again.
    with pytest.raises(RateLimited) as caught:
        await allowance.reserve(one, Worst(tokens=101))
    assert "try again" not in caught.value.message and "Lower max_tokens" in caught.value.message


async def test_streams_at_once(allowing):
    allowance, one = allowing(), caller(streams=2)
    running = await allowance.reserve(one, Worst(streams=2))
    with pytest.raises(RateLimited, match="2 streams at once, of which 0 are left") as caught:
        await allowance.reserve(one, Worst(streams=1))
    assert (caught.value.code, caught.value.headers["Retry-After"]) == (971, "1")
    running.settle({})
    (await allowance.reserve(one, Worst(streams=2))).settle({})


async def test_budgets_tell_what_is_left_and_what_it_could_cost(allowing):
    allowance = allowing()
    with pytest.raises(BudgetSpent) as caught:
        await allowance.reserve(
            caller(neurons_per_day=10 * MICRO),
            Worst(neurons=12_500_000, because="37 prompt tokens, max_tokens 4096"),
        )
    error = caught.value
    assert (error.code, error.status, error.name) == (3036, 429, "insufficient_quota")
    assert error.message == (
        "The daily budget of this account is 10 in neurons, of which 10 is left until 00:00 UTC, and this request "
        "could cost up to 12.5 (37 prompt tokens, max_tokens 4096). Lower max_tokens or shorten the prompt, or wait "
        "for the next budget."
    )
    # Until midnight; clients that would try again at once are told not to.
    assert int(error.headers["Retry-After"]) in (43169, 43170) and error.headers["x-should-retry"] == "false"
    with pytest.raises(BudgetSpent, match="monthly budget of this key is 2.5 in EUR, of which 2.5 is left") as caught:
        await allowance.reserve(caller(Limits(money_per_month=5 * NANO // 2)), Worst(money=3 * NANO, currency="EUR"))
    assert 9 * 86400 < int(caught.value.headers["Retry-After"]) < 10 * 86400
    # What costs nothing needs no budget.
    (await allowance.reserve(caller(neurons_per_day=0), Worst(tokens=10))).settle({})


async def test_the_free_plan(allowing):
    free, paid = allowing(plan="free"), allowing()
    with pytest.raises(PaidPlanNeeded, match="needs the paid plan") as caught:
        free.check_plan(caller(), "@cf/x/y", paid=True)
    assert (caught.value.code, caught.value.status) == (5035, 403)
    free.check_plan(caller(), "@cf/x/y", paid=False)
    free.check_plan(caller(plan="paid"), "@cf/x/y", paid=True)
    with pytest.raises(PaidPlanNeeded):
        paid.check_plan(caller(plan="free"), "@cf/x/y", paid=True)
    with pytest.raises(BudgetSpent, match="is 10000 in neurons"):
        await free.reserve(caller(), Worst(neurons=FREE_NEURONS + 1))
    (await free.reserve(caller(neurons_per_day=2 * FREE_NEURONS), Worst(neurons=FREE_NEURONS + 1))).settle({})
    (await paid.reserve(caller(), Worst(neurons=FREE_NEURONS + 1))).settle({})
    assert read_limits({"plan": "free"}).shown() == {"plan": "free"}


async def test_what_another_gateway_has_and_does_not_use_is_waited_for(allowing):
    one, two = allowing(), allowing()
    who = caller(neurons_per_day=1000 * MICRO)
    for _ in range(8):
        (await one.reserve(who, Worst(neurons=100 * MICRO))).settle({})
    held, leased = one.leases.held()[Quota("team-a", "", NEURONS)]
    assert held == 0 and leased > 0
    (await two.reserve(who, Worst(neurons=1000 * MICRO))).settle({})


async def test_many_at_once_are_let_in_by_few_exchanges(allowing, store):
    exchanges = []
    lease = store.leases.lease
    store.leases.lease = lambda *asked: (exchanges.append(1), lease(*asked))[1]
    allowance, who = allowing(), caller(requests_per_minute=10_000, tokens_per_minute=10**9)
    for _ in range(5):
        told = await asyncio.gather(*(allowance.request(who, "t") for _ in range(200)))
        await asyncio.gather(*(allowance.reserve(who, Worst(tokens=100)) for _ in range(200)))
    assert len(told) == 200 and len(exchanges) < 100


async def test_without_the_store_for_long_nothing_is_let_in(allowing):
    away = 0.0
    allowance = allowing(away=lambda: away, away_s=60.0)
    await allowance.request(caller(), "t")
    away = 60.5
    with pytest.raises(StoreAway, match="away for more than 60 seconds"):
        await allowance.request(caller(), "t")
    with pytest.raises(StoreAway):
        allowance.check_away()


async def test_a_store_that_is_slow_is_no_spent_budget(allowing, store, monkeypatch):
    allowance, who = allowing(), caller(neurons_per_day=1000 * MICRO, requests_per_minute=1000)
    (await allowance.reserve(who, Worst(neurons=MICRO))).settle({})
    answers, lease = threading.Event(), store.leases.lease
    store.leases.lease = lambda *asked: (answers.wait(60), lease(*asked))[1]
    with monkeypatch.context() as patch, pytest.raises(StoreAway, match="cannot be reached in time"):
        patch.setattr(allowance_module, "PATIENCE_S", 0.1)
        await allowance.reserve(who, Worst(neurons=900 * MICRO))
    answers.set()
    (await allowance.reserve(who, Worst(neurons=900 * MICRO))).settle({})
    with pytest.raises(BudgetSpent):
        await allowance.reserve(who, Worst(neurons=1001 * MICRO))


async def test_without_the_store_no_budget_is_spent_that_is_not_leased(allowing, store):
    allowance, who = allowing(), caller(neurons_per_day=1000 * MICRO, requests_per_minute=1000)
    (await allowance.reserve(who, Worst(neurons=MICRO))).settle({})

    def gone(*asked):
        raise Away("gone")

    store.leases.lease = gone
    with pytest.raises(StoreAway, match="nobody else knows what is left of the limit") as caught:
        while True:
            await allowance.reserve(who, Worst(neurons=900 * MICRO))
    assert (caught.value.code, caught.value.status) == (3040, 503)
    assert "r=999" in (await allowance.request(who, "t"))["Ratelimit"]


async def test_who_stops_waiting_holds_nothing(allowing):
    allowance, who = allowing(), caller(streams=1)
    waiting = [asyncio.ensure_future(allowance.reserve(who, Worst())) for _ in range(10)]
    await asyncio.sleep(0)
    for one in waiting:
        one.cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    for one in done:
        if not isinstance(one, BaseException):
            one.settle({})
    (await allowance.reserve(who, Worst())).settle({})
