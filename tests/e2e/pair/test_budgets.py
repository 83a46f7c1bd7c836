"""A budget that 64 hostile clients share over two gateways: what the ledger says of them is not one neuron above it."""

from __future__ import annotations

import asyncio
import random
import time

import httpx

from serve_app.state.callers.limits import MICRO
from serve_app.state.spending.quotas import DAY_S, NEURONS, Quota
from serve_app.state.store.spending import spent
from serve_app.state.store.sql import SqlStore
from tests.e2e.pair.client import body
from tests.e2e.pair.deployment import Pair
from tests.waiting import until

# A token costs a neuron.
BUDGET, CLIENTS, TURNS = 1000, 64, 3
NAME = "spender"


def used(pair: Pair) -> int:
    """Micro-neurons in the ledger."""
    with SqlStore(pair.home) as store, store.database.reading() as connection:
        return spent.since(connection, Quota(NAME, "", NEURONS), int(time.time()) // DAY_S * DAY_S)


async def test_not_one_neuron_above(pair, gateways, clients):
    with SqlStore(pair.home) as store:
        store.accounts.create(NAME, limits={"neurons_per_day": str(BUDGET)})
    client = await clients(NAME)
    told: list[float] = []
    refusals: list[httpx.Response] = []

    async def hostile(number: int) -> None:
        """Asks for several answers at once, at either gateway, and leaves some of them."""
        draw = random.Random(number)
        for turn in range(TURNS):
            asked = {**body(number * TURNS + turn, draw.randrange(1, 12)), "n": draw.choice([1, 1, 2])}
            sending = asyncio.ensure_future(client.ask(draw.choice(gateways), asked))
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.2)
                sending.cancel()
            answer = (await asyncio.gather(sending, return_exceptions=True))[0]
            if isinstance(answer, httpx.Response) and answer.status_code == 200:
                told.append(answer.json()["usage"]["neurons"])
            elif isinstance(answer, httpx.Response):
                refusals.append(answer)

    await asyncio.gather(*(hostile(number) for number in range(CLIENTS)))
    for answer in refusals:
        assert answer.status_code == 429, answer.text
        assert answer.json()["errors"][0]["code"] == 3036 and "could cost up to" in answer.text
        assert int(answer.headers["Retry-After"]) <= DAY_S
    assert refusals and told
    await until(lambda: used(pair) >= round(sum(told) * MICRO))
    total = used(pair)
    assert sum(told) * MICRO - 1 <= total <= BUDGET * MICRO
    # What nobody spent is there: an answer of one token still fits, or costs more than is left.
    left = BUDGET * MICRO - total
    last = await client.ask(gateways[0], {**body(999, 1), "prompt": "a"})
    if last.status_code == 200:
        assert last.json()["usage"]["neurons"] * MICRO <= left
    else:
        assert last.status_code == 429 and left < 3 * MICRO, (last.text, left)
