"""Lists of requests, and the cluster's view: what is told to whom."""

from __future__ import annotations

import time

import pytest

from serve_app.api.errors import OutOfCapacity
from serve_app.api.types import Usage
from serve_app.gateway.scaling import ScalingLog
from serve_app.state.callers.accounts import Caller
from tests.dashboard.test_session import a_key
from tests.waiting import until

CHAT = "@cf/pico/pico-instruct"


async def test_requests_are_listed_filtered_and_paged_each_to_its_own_account(served):
    gateway = served.gateways[0]
    model = gateway.models.get(CHAT)
    ids: dict[str, list[str]] = {"team-a": [], "local": []}
    for number in range(6):
        account = ("team-a", "local")[number % 2]
        name = f"{number:032x}"
        ids[account].append(name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(gateway.runtime, "request_id", lambda name=name: name)
            try:
                facts = {"prompt_tokens": 9}
                async with gateway.runtime.work(model, Caller(account, key="k"), facts=facts) as work:
                    work.usage = Usage(prompt_tokens=9, cached_tokens=3, completion_tokens=number)
                    work.trace.event("first token", cached_tokens=3)
                    if number >= 4:
                        raise OutOfCapacity
            except OutOfCapacity:
                pass
    _, team = await a_key(served, ["read"], "team-a")

    async def listed(query: str = "", key: str | None = None) -> list[dict]:
        more = {} if key is None else {"key": key}
        answer = await served.call("GET", f"/v1/requests?{query}", **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    async def there() -> bool:
        return len(await listed()) == 6

    await until(there)
    every = await listed()
    assert [each["id"] for each in every] == [f"{n:032x}" for n in reversed(range(6))]
    done = every[-2]
    assert (done["account"], done["model"], done["status"]) == ("local", CHAT, "done")
    assert (done["prompt_tokens"], done["cached_tokens"], done["completion_tokens"]) == (9, 3, 1)
    assert 0 <= done["ttft_ms"] <= done["total_ms"] and abs(done["time"] - time.time()) < 600

    async def charged() -> bool:
        return all(each["neurons"] > 0 and each["key"] == "k" for each in await listed("status=done"))

    await until(charged)
    assert {each["status"] for each in every[:2]} == {"refused"}
    assert [each["id"] for each in await listed("status=done&account=team-a")] == ids["team-a"][1::-1]
    assert await listed("min_ms=1000000") == [] == await listed("model=another")
    # Page by page.
    seen, before = [], ""
    while before is not None:
        page = (await served.call("GET", f"/v1/requests?limit=4&before={before}")).json()
        seen += [each["id"] for each in page["result"]]
        before = page["next"]
    assert seen == [each["id"] for each in every]
    # Others see their own, and ask for no other's; below an account it is that one's.
    assert {each["account"] for each in await listed(key=team)} == {"team-a"}
    assert (await served.call("GET", "/v1/requests?account=local", team)).status_code == 403
    own = await served.call("GET", "/client/v4/accounts/local/ai/requests")
    assert {each["account"] for each in own.json()["result"]} == {"local"}
    for bad in ("min_ms=x", "before=-1", "limit=nan"):
        assert (await served.call("GET", f"/v1/requests?{bad}")).status_code == 400


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_cluster_is_told_to_the_operator(served):
    told = (await served.call("GET", "/v1/cluster")).json()
    assert CHAT in [model["model"] for model in told["models"]] and told["nodes"] == []
    _, team = await a_key(served, ["read"], "team-a")
    assert (await served.call("GET", "/v1/cluster", team)).status_code == 403


def test_changes_of_workers_are_noted_with_the_planners_reason():
    workers: list[dict[str, str]] = []
    stats = {"m": {"workers": workers, "plan": {"needed": {"decode": 1.5}, "why": "more decode"}}}
    log = ScalingLog(lambda: stats)
    log.look(1.0)
    workers.append({"stage": "decode", "role": "decode"})
    log.look(2.0)
    log.look(3.0)
    workers[0]["role"] = "mixed"
    log.look(4.0)
    assert [(c["time"], c["workers"]) for c in log.changes] == [(1.0, {}), (2.0, {"decode/decode": 1}),
                                                               (4.0, {"decode/mixed": 1})]  # fmt: skip
    assert log.changes[1]["why"] == "more decode" and log.changes[1]["needed"] == {"decode": 1.5}
