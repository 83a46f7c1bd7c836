"""A budget that hostile clients share over two gateways: what the ledger says of them is not one neuron above it."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from serve_app.state.callers.limits import MICRO
from serve_app.state.spending.quotas import DAY_S, NEURONS, Quota
from serve_app.state.store.spending import spent
from serve_app.state.store.sql import SqlStore
from tests.e2e.pair.client import body
from tests.e2e.pair.deployment import Pair
from tests.variants import some
from tests.waiting import until

# Requests of each client.
TURNS = 3
NAME = "spender"


def used(pair: Pair) -> int:
    """Micro-neurons in the ledger."""
    with SqlStore(pair.home) as store, store.database.reading() as connection:
        return spent.since(connection, Quota(NAME, "", NEURONS), int(time.time()) // DAY_S * DAY_S)


# A token costs a neuron.
@pytest.mark.parametrize(("hostiles", "budget"), some([(20, 300), (64, 1000)], (20, 300), names=2))
async def test_not_one_neuron_above(pair, gateways, clients, hostiles, budget):
    with SqlStore(pair.home) as store:
        store.accounts.create(NAME, limits={"neurons_per_day": str(budget)})
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

    await asyncio.gather(*(hostile(number) for number in range(hostiles)))
    # On a busy machine the store may take too long to say what is left.
    late = [answer for answer in refusals if answer.status_code == 503]
    assert all("cannot be reached in time" in answer.text for answer in late), late[0].text
    refusals = [answer for answer in refusals if answer not in late]
    for answer in refusals:
        assert answer.status_code == 429, answer.text
        assert answer.json()["errors"][0]["code"] == 3036 and "could cost up to" in answer.text
        assert int(answer.headers["Retry-After"]) <= DAY_S
    assert refusals and told
    await until(lambda: used(pair) >= round(sum(told) * MICRO))
    assert sum(told) * MICRO - 1 <= used(pair) <= budget * MICRO
    # What nobody spent is there once the requests that clients left have ended: an answer of one token still fits, or
    # costs more than is left.
    async with asyncio.timeout(60):
        while True:
            left = budget * MICRO - used(pair)
            last = await client.ask(gateways[0], {**body(999, 1), "prompt": "a"})
            if last.status_code == 200 or left < 3 * MICRO:
                break
            assert last.status_code in (429, 503) and int(last.headers["Retry-After"]) > 0, last.text
            await asyncio.sleep(0.2)
    assert used(pair) <= budget * MICRO
    if last.status_code == 200:
        assert last.json()["usage"]["neurons"] * MICRO <= left
