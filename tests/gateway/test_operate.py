"""Models by hand: what is added, started, scaled and stopped over HTTP, at every gateway and after a restart."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.catalog.load import load_catalog
from serve_app.catalog.operated import Operated
from serve_app.gateway import operate
from serve_app.state.check import read_operated
from serve_app.state.store.sql import SqlStore
from tests.gateway.http.test_accounts import CHAT, Served
from tests.waiting import until

MINE = "@cf/me/mine"
RECORD = """\
id: "@cf/me/mine"
task: reranking
description: Added by hand.
created_at: "2026-11-01"
weights: {path: checkpoints/pico-reranker}
price: {input: 0.003}
serving: {local: {reranker: {num_cpus: 1}}}
"""
RECORDS, ACTIONS = "/client/v4/accounts/local/ai/models/records", "/client/v4/accounts/local/ai/models/actions"


class Serve:
    """What Serve was told, as :class:`serve_app.gateway.operate.Deployer`; ``problem`` is raised instead."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.problem: Exception | None = None
        # Set while Serve answers.
        self.there = threading.Event()
        self.there.set()

    def deploy(self, record: Any, profile: Any, source: Path, *, keep: bool) -> None:
        self._tell("deploy", record.id, _bounds(profile), keep)

    def end(self, model: str) -> None:
        self._tell("end", model)

    def _tell(self, *what: Any) -> None:
        self.there.wait(60)
        if self.problem is not None:
            raise self.problem
        self.told.append(what)


def _bounds(profile: Any) -> dict[str, tuple[int, int]]:
    return {name: (stage.min_replicas, stage.max_replicas) for name, stage in profile.stages.items()}


@pytest.fixture
async def operated(served: Served) -> tuple[Served, Serve]:
    deployer = Serve()
    await served.gateways[0].by_hand.start()
    served.gateways[0].by_hand.deployer = deployer
    return served, deployer


async def add(served: Served, text: str, **more: Any) -> httpx.Response:
    return await served.call("POST", RECORDS, json={"record": text, **more})


async def act(served: Served, action: str, model: str = MINE, **more: Any) -> httpx.Response:
    return await served.call("POST", ACTIONS, json={"model": model, "action": action, **more})


def reason(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["errors"][0]["message"]


async def searched(served: Served, at: int = 0) -> set[str]:
    found = await served.call("GET", "/client/v4/accounts/local/ai/models/search?per_page=1000", at=at)
    return {one["name"] for one in found.json()["result"]}


async def record_of(served: Served, model: str = MINE, at: int = 0) -> dict[str, Any] | None:
    found = (await served.call("GET", RECORDS, at=at)).json()["result"]
    return next((one for one in found if one["model"] == model), None)


async def test_added_started_scaled_stopped_and_removed(operated, database):
    served, serve = operated
    assert (await add(served, RECORD, check=True)).json()["result"]["added"] is False
    assert await record_of(served) is None
    told = (await add(served, RECORD)).json()["result"]
    assert told == {"model": MINE, "task": "reranking", "profiles": ["local"], "added": True}
    shown = await record_of(served)
    assert shown and (shown["source"], shown["started"], shown["startable"]) == ("added", False, True)
    # It is in the catalogue, and not started before somebody says so.
    assert MINE not in await searched(served) and not serve.told
    assert "is not started" in reason(await act(served, "stop"))
    body = {"query": "x", "contexts": [{"text": "y"}]}
    refused = await served.call("POST", f"/client/v4/accounts/local/ai/run/{MINE}", json=body)
    assert "can start it on the page Models" in reason(refused)

    shown = (await act(served, "start")).json()["result"]
    assert (shown["started"], shown["state"]) == (True, "waiting")
    assert serve.told == [("deploy", MINE, {"reranker": (1, 1)}, False)]
    assert MINE in await searched(served)
    gateway = served.gateways[0]
    # The server is as ready as it was, while this one loads.
    assert not gateway.models.started[MINE].ready and gateway.health.ready
    assert gateway.prices.price(MINE, 0.0) is not None

    before = gateway.models.started[MINE]
    assert (await act(served, "scale", min_replicas=2, max_replicas=3)).status_code == 200
    assert serve.told[1:] == [("deploy", MINE, {"reranker": (2, 3)}, True)]
    # Requests of it go on with what they have.
    assert gateway.models.started[MINE] is before and before.profile.stages["reranker"].max_replicas == 3
    assert (await act(served, "scale", replicas=1)).json()["result"]["stages"] == {
        "reranker": {"min_replicas": 1, "max_replicas": 1}
    }

    # Another gateway, which starts now, has all of that; and one that runs hears of what comes.
    at = await served.start()
    await served.gateways[at].by_hand.start()
    assert MINE in await searched(served, at)
    assert "Stop it first" in reason(await add(served, RECORD), 409)
    assert "Stop it first" in reason(await served.call("DELETE", f"{RECORDS}/{MINE}"), 409)
    assert (await act(served, "stop")).status_code == 200 and serve.told[3:] == [("end", MINE)]
    assert MINE not in await searched(served)
    await until(lambda: MINE not in served.gateways[at].models.started)
    # Whoever has heard nothing of the first time asks again, and Serve is asked again.
    assert (await act(served, "stop")).status_code == 200 and serve.told[4:] == [("end", MINE)]

    assert (await served.call("DELETE", f"{RECORDS}/{MINE}")).status_code == 200
    assert await record_of(served) is None
    await until(lambda: MINE not in served.gateways[at].models.catalog)
    trail = (await served.call("GET", "/client/v4/accounts/local/logs/audit")).json()["result"]
    done = [one["action"]["type"] for one in trail if one["resource"]["id"] == MINE]
    assert done == ["delete", "update", "update", "update", "update", "create"]
    assert "waits" not in str(trail)


async def test_what_runs_by_the_settings_is_stopped_and_started_and_stays_so(operated):
    served, serve = operated
    assert (await act(served, "stop", CHAT)).status_code == 200
    assert serve.told == [("end", CHAT)] and CHAT not in await searched(served)
    asked = await served.call("POST", "/v1/chat/completions", json={"model": CHAT, "messages": []})
    assert "can start it" in reason(asked, 404)
    home, url = Path(served.gateways[0].settings.home), served.gateways[0].settings.database
    again = load_catalog(home, operated=read_operated(home, url))
    assert CHAT not in {record.id for record, _ in again.started("local")}
    assert (await act(served, "start", CHAT)).status_code == 200
    assert (await act(served, "scale", CHAT, stage="prefill", max_replicas=4)).status_code == 200
    again = load_catalog(home, operated=read_operated(home, url))
    [bounds] = [_bounds(profile) for record, profile in again.started("local") if record.id == CHAT]
    assert bounds["prefill"][1] == 4 and bounds == serve.told[-1][2]


WRONG = [
    ("- 1", "a record is a mapping"),
    ("id: [", "line 1"),
    (RECORD + "colour: red\n", "colour: unknown key. Remove it"),
    (RECORD.replace("reranking", "dreaming"), "'dreaming' is not one of the allowed values"),
    (RECORD.replace("pico-reranker", "nowhere"), "weights.path: there is no directory"),
    (RECORD.replace("{num_cpus: 1}", "{min_replicas: 3}"), "min_replicas 3 is above max_replicas 1"),
    (RECORD.replace("description: Added by hand.", "description: &a x\nlicense: *a"), "aliases (*name)"),
    (RECORD.replace("@cf/me/mine", "<script>alert(1)</script>"), "is not a model id"),
    (RECORD + "id: twice\n", "'id' is given twice"),
    ("a: " + "[" * 5000, "nested deeper than 20"),
    ("x" * 70_000, "65536 are the most"),
    ("", "YAML text of a record"),
]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_wrong_record_is_refused_with_the_loaders_reason(operated):
    served, serve = operated
    for text, says in WRONG:
        for check in (True, False):
            assert says in reason(await add(served, text, check=check)), text[:60]
    assert not serve.told and not served.gateways[0].models.catalog.operated


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_cannot_be_done_is_refused(operated):
    served, serve = operated
    for body, says in [
        ({"model": CHAT, "action": "explode"}, "start, stop, scale, canary"),
        ({"action": "start"}, "model is the id"),
        ({"model": CHAT, "action": "scale"}, "Give replicas"),
        ({"model": CHAT, "action": "scale", "replicas": 2, "max_replicas": 3}, "Give replicas"),
        ({"model": CHAT, "action": "scale", "replicas": True}, "whole number"),
        ({"model": CHAT, "action": "scale", "replicas": 5000}, "from 0 to 1000"),
        ({"model": CHAT, "action": "scale", "stage": "cook", "replicas": 2}, "decode, prefill, draft"),
        ({"model": CHAT, "action": "scale", "min_replicas": 3, "max_replicas": 2}, "is above max_replicas"),
        ({"model": CHAT, "action": "scale", "min_replicas": 0}, "scales to zero is for its record"),
        ({"model": "@cf/qwen/qwen3-8b", "action": "start"}, "has no local profile"),
    ]:
        assert says in reason(await served.call("POST", ACTIONS, json=body)), body
    assert "no model @cf/no/such" in reason(await act(served, "start", "@cf/no/such"), 404)
    assert "files are removed by hand" in reason(await served.call("DELETE", f"{RECORDS}/{CHAT}"), 404)
    assert not serve.told
    # Kept, and told to be asked again.
    serve.problem = RuntimeError("the controller is away")
    assert "Ask again" in reason(await act(served, "stop", CHAT), 503)
    serve.problem = None
    assert (await act(served, "start", CHAT)).status_code == 200


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_serve_that_does_not_answer_holds_nobody_up(operated, monkeypatch):
    """As a call to a controller that was lost."""
    served, serve = operated
    monkeypatch.setattr(operate, "SERVE_S", 0.05)
    serve.there.clear()
    assert "did not answer within" in reason(await act(served, "stop", CHAT), 503)
    serve.there.set()
    assert (await act(served, "stop", CHAT)).status_code == 200


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_only_the_operator_may(operated):
    served, serve = operated
    await served.call("POST", "/client/v4/accounts", json={"name": "team"})
    body = {"name": "boss", "scopes": ["inference", "read", "admin"]}
    made = await served.call("POST", "/client/v4/accounts/team/tokens", json=body)
    key = made.json()["result"]["value"]
    for method, path in (("GET", RECORDS), ("POST", RECORDS), ("POST", ACTIONS), ("DELETE", f"{RECORDS}/{CHAT}")):
        for account in ("local", "team"):
            where = path.replace("/local/", f"/{account}/")
            answer = await served.call(method, where, key, json={"model": CHAT, "action": "stop", "record": RECORD})
            assert answer.status_code == 403, (method, where)
    assert not serve.told


def test_what_can_no_longer_be_followed_is_left_out_and_told(tmp_path):
    """A start is not held up by what was said by hand long ago."""
    gone = RECORD.replace("pico-reranker", "nowhere")
    said = {
        MINE: Operated(MINE, gone, True),
        "@cf/me/broken": Operated("@cf/me/broken", "id: [", True),
        CHAT: Operated(CHAT, bounds={"cook": (1, 1)}),
    }
    catalog = load_catalog(tmp_path, operated=said)
    started = {record.id: profile for record, profile in catalog.started("local")}
    assert MINE not in started and CHAT in started
    assert set(catalog.problems) == set(said) and "there is no directory" in catalog.problems[MINE]


def test_a_start_reads_what_was_said_without_the_store(tmp_path):
    assert read_operated(tmp_path, None) == {}
    with SqlStore(tmp_path) as store:
        assert read_operated(tmp_path, None) == {}  # no file yet
        store.open()
        said = Operated(MINE, RECORD, True, {"reranker": (1, 2)})
        store.operated.put("local", said)
        assert read_operated(tmp_path, None) == store.operated.all() == {MINE: said}


async def test_a_gateway_goes_on_where_a_record_in_the_store_is_damaged(operated):
    served, _ = operated
    gateway = served.gateways[0]
    broken = Operated("@cf/me/broken", "id: [", True)
    await asyncio.to_thread(gateway.state.operated.store.put, "local", broken)
    await until(lambda: "@cf/me/broken" in gateway.models.catalog.problems)
    shown = await record_of(served, "@cf/me/broken")
    assert shown and "line 1" in shown["problem"] and CHAT in await searched(served)
