"""A price list that changes while a gateway serves: what comes costs the new price, what came keeps its own."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.types import GenerateRequest
from serve_app.sampling_params import SamplingParams
from serve_app.state.spending.usage import UsageQuery
from tests.catalog.test_price_file import put
from tests.tasks.conftest import ACCOUNT, Served
from tests.tasks.test_backend import EchoBackend
from tests.tasks.test_settle import CHAT
from tests.waiting import until

# Three tokens in, one of them cached, and three out.
ASKED = {"prompt": "one two three"}


async def cost(served: Served, **more: Any) -> tuple[Decimal, str]:
    answer = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    told = answer.json()["result"]["usage"]["cost"]
    return Decimal(told["amount"]), told["currency"]


def listed(price: str, currency: str = "USD", since: str = "2026-01-01") -> str:
    return f'currency: {currency}\nprices: [{{model: "{CHAT}", from: {since}, input: {price}, output: {price}}}]\n'


@pytest.fixture
async def served(serve: Any, tmp_path: Path) -> Any:
    async with serve(models=(CHAT,)) as found:
        await found.gateway.state.start()
        found.gateway.price_watch.start()
        found.gateway.backends[CHAT] = EchoBackend()
        yield found
        found.gateway.price_watch.close()


async def test_a_running_gateway_takes_a_changed_list_over_and_refuses_a_broken_one(served, tmp_path) -> None:
    path, prices, file = tmp_path / "prices.yaml", served.gateway.prices, served.gateway.price_watch.file
    before = await cost(served)
    put(path, listed("1000000", "EUR"))
    await until(lambda: prices.currency == "EUR")
    assert await cost(served) == (Decimal(6), "EUR")
    put(path, listed("x", "CHF"))
    await until(lambda: "is no price" in file.problem)
    assert await cost(served) == (Decimal(6), "EUR")
    status = await served.http.get("/v1/status")
    assert status.json()["gateway"]["prices"] == {"currency": "EUR", "problem": file.problem}
    # A price that is to come changes nothing yet.
    later = f'  - {{model: "{CHAT}", from: 2999-01-01, input: 9, output: 9}}\n'
    put(path, "currency: EUR\nprices:\n  - " + listed("2000000").split("prices: [")[1].replace("]", "") + later)
    await until(lambda: len(prices._listed.prices) == 2)
    assert await cost(served) == (Decimal(12), "EUR") and not file.problem
    # What was used before stays at the price that it had.
    await until(lambda: served.gateway.state.ledger.waiting == 0)
    page = await served.gateway.state.usage.sums(UsageQuery(0, 2**31, "local", None, ("currency",)))
    spent = {row.dimensions["currency"]: Decimal(row.money) / 10**9 for row in page.rows}
    assert spent == {before[1]: before[0], "EUR": Decimal(24)}


async def test_a_request_that_has_begun_keeps_its_price_and_its_budget(served, tmp_path) -> None:
    """In EUR it was let in and in EUR it is charged; the budget of the new currency knows nothing of it."""
    path, gateway = tmp_path / "prices.yaml", served.gateway
    put(path, listed("1000000", "EUR"))
    await until(lambda: gateway.prices.currency == "EUR")
    gateway.state.admin.create("local", limits={"money_per_month": "13"})
    gateway.state._fill()
    [model] = gateway.models
    request = GenerateRequest(CHAT, None, "one two three", True, SamplingParams(max_tokens=3))
    events = await gateway.generate(model, request, gateway.state.accounts.own())
    await anext(events)
    put(path, listed("2000000", "USD"))
    await until(lambda: gateway.prices.currency == "USD")
    assert await cost(served, max_tokens=3) == (Decimal(12), "USD")
    assert [event async for event in events]
    charged = [(s.entry.money // 10**9, s.entry.currency) for s in served.settled]
    assert charged == [(12, "USD"), (6, "EUR")]
    refused = await served.http.post(f"{ACCOUNT}/run/{CHAT}", json={**ASKED, "max_tokens": 3})
    assert refused.status_code == 429 and "is 13 in USD, of which 1 is left" in refused.text
    put(path, listed("1000000", "EUR"))
    await until(lambda: gateway.prices.currency == "EUR")
    assert await cost(served, max_tokens=3) == (Decimal(6), "EUR")
