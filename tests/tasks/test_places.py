"""Places of a model: whoever floods is refused, and nobody else."""

from __future__ import annotations

import asyncio
from math import log
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.state.callers.accounts import Account, Key, hash_key
from serve_app.tasks.places import Places
from tests.tasks.conftest import ACCOUNT
from tests.tasks.test_settle import BODIES, EMBED, encoded

LIMIT = 24
NAMES = "abcde"
steps = st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.integers(1, 4)), max_size=200)


@settings(max_examples=200, deadline=None)
@given(steps=steps, weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=5, max_size=5))
def test_whoever_is_below_its_share_gets_in(steps, weights) -> None:
    weight = dict(zip(NAMES, weights, strict=True))
    places, requests = Places(), {name: [] for name in NAMES}
    for name, comes, streams in steps:
        if not comes:
            if requests[name]:
                places.give_back(name, requests[name].pop())
            continue
        held, share = places.held(name), places.share(name, weight[name], LIMIT)
        free = places.taken + streams <= LIMIT
        admitted = places.take(name, weight[name], streams, LIMIT)
        assert admitted or (held and not free and held + streams > share)
        # Who has its share gets no more of what is taken.
        assert not admitted or free or not held or held + streams <= share
        if admitted:
            requests[name].append(streams)
        assert [places.held(one) for one in NAMES] == [sum(requests[one]) for one in NAMES]
        assert places.taken == sum(map(sum, requests.values()))
        # By weight: an account's share is at most LIMIT over the place it has among those that came before it.
        assert places.taken <= LIMIT * (2 + log(len(NAMES) * 4))


def test_accounts_that_come_one_after_the_other_hold_a_bounded_number() -> None:
    places = Places()
    for k in range(1, 33):
        taken = sum(places.take(str(k), 1.0, 1, LIMIT) for _ in range(10 * LIMIT))
        assert taken == max(LIMIT // k, 1)


async def test_an_account_that_floods_gets_the_429_and_another_is_served(serve) -> None:
    going = asyncio.Event()

    async def slow(*call: Any) -> Any:
        await going.wait()
        return await encoded(*call)

    async with serve(slow, models=(EMBED,), max_inflight=4) as served:
        # What the store has is read before, and no more.
        await served.gateway.state.start()
        key = Key("another", hash_key("another"))
        served.gateway.state.accounts.fill({"other": Account("other", 1.0, (key,))})
        [model] = served.gateway.models
        path = f"{ACCOUNT}/run/{EMBED}"
        flood = [asyncio.ensure_future(served.http.post(path, json=BODIES[EMBED])) for _ in range(12)]
        while sum(task.done() for task in flood) < 8:
            await asyncio.sleep(0.01)
        assert model.inflight == 4
        headers = {"Authorization": "Bearer another"}
        other = asyncio.ensure_future(
            served.http.post(path.replace("local", "other"), json=BODIES[EMBED], headers=headers)
        )
        while model.inflight == 4 and not other.done():
            await asyncio.sleep(0.01)
        going.set()
        assert (await other).status_code == 200
        assert sorted(answer.status_code for answer in await asyncio.gather(*flood)) == [200] * 4 + [429] * 8
        assert model.inflight == 0
