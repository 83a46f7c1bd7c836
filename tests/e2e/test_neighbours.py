"""A gateway in this process whose neighbour is the running stack: what is passed over HTTP, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.calls import ask_all_replicas, call_application
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.neighbours import join
from serve_app.gateway.neighbours.client import OFFERS, PASS, Client, Stream
from serve_app.gateway.settings import GatewaySettings, Listed
from serve_app.state.callers.accounts import hash_key
from serve_app.state.store.sql import SqlStore
from serve_app.tasks.work import Settled
from tests.conftest import share_weights
from tests.e2e.conftest import CHAT, eos_id
from tests.waiting import until, wait_for

KEY = "a key of this test alone"
# As the stack lists it in its settings.
PEER = "other-cluster"


async def nobody(*_: Any) -> Any:
    raise AssertionError("no worker was to be called")


class Edge:
    """A gateway of another cluster, which has no workers unless it is given the stack's."""

    def __init__(self, gateway: Gateway, stack: Any) -> None:
        self.gateway = gateway
        self.stack = stack
        self.settled: list[Settled] = []
        gateway.settlement.subscribers.append(self.settled.append)
        transport = httpx.ASGITransport(build_http(gateway))
        headers = {"Authorization": f"Bearer {KEY}"}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers, timeout=120)

    @property
    def passed(self) -> dict[str, int]:
        return {how: count for (_, _, how), count in self.gateway.tally.neighbours.passed.items()}

    async def events(self, answer: httpx.Response) -> dict[str, dict[str, Any]]:
        found = await self.http.get(f"/v1/requests/{answer.headers['cf-ray']}")
        return {event["event"]: event for event in found.json()["events"]}


def ask(n: int, tokens: int = 24, **more: Any) -> dict[str, Any]:
    prompt = f"Number {n}: " + "say it again " * 6
    fixed = {"raw": True, "temperature": 0, "logit_bias": {eos_id(): -100}}
    return {"model": CHAT, "prompt": prompt, "max_tokens": tokens, **fixed, **more}


@pytest.fixture(scope="module")
def peer(stack: Any) -> Iterator[str]:
    """The key that the stack has given to another cluster."""
    with SqlStore(stack.home) as store:
        key = store.accounts.add(PEER)

    def known() -> bool:
        answer = httpx.get(f"{stack.url}{OFFERS}", headers={"Authorization": f"Bearer {key}"}, timeout=60)
        return answer.status_code == 200

    wait_for(known)
    yield key
    with SqlStore(stack.home) as store:
        store.accounts.remove(PEER)


@pytest.fixture
async def edge(stack: Any, peer: str, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Edge]]]:
    made: list[tuple[Edge, Any]] = []

    async def make(*, workers: bool = False, key: str = "") -> Edge:
        share_weights(tmp_path)
        listed = (Listed("paris", stack.url, key or peer),)
        settings = GatewaySettings(
            "local", (hash_key(KEY),), "s", str(tmp_path), "local", models=(CHAT,), neighbours=listed
        )
        gateway = Gateway(settings, call_application if workers else nobody, ask_all_replicas if workers else None)
        await gateway.inbox.start()
        if workers:
            gateway._subscriptions.start(plans=False)
            for model in gateway.models:
                model.ready = True
        found = Edge(gateway, stack)
        made.append((found, join(gateway)))
        return found

    yield make
    for found, joined in made:
        await joined.aclose()
        await found.http.aclose()
        await found.gateway.inbox.aclose()
        found.gateway.close()


async def seen(edge: Edge) -> None:
    """Until it knows that the stack serves the model."""
    [model] = edge.gateway.models
    await until(lambda: model.elsewhere, 60)


async def test_what_no_worker_here_can_serve_is_served_there_word_for_word(edge, stack, peer) -> None:
    here = await edge()
    refused = await here.http.post("/v1/completions", json=ask(1))
    await seen(here)
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=120) as direct:
        expected = (await direct.post("/v1/completions", json=ask(1))).json()
        answer = await here.http.post("/v1/completions", json=ask(1))
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["choices"][0]["text"] == expected["choices"][0]["text"]
        assert told["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert told["usage"]["completion_tokens"] == 24
        # Charged here, once, to who asked; there it is work of the account that this cluster is known by.
        [settled] = [one for one in here.settled if one.status == "done"]
        assert settled.entry is not None and settled.entry.units["output_tokens"] == 24
        events = await here.events(answer)
        assert events["passing"]["to"] == "paris" and "routed" not in events
        own_id = answer.headers["cf-ray"]

        async def there() -> dict[str, Any] | None:
            """The trace of the passed request, once the store has it."""
            bearer = {"Authorization": f"Bearer {peer}"}
            for one in (await direct.get("/v1/requests?limit=20", headers=bearer)).json()["result"]:
                found = (await direct.get(f"/v1/requests/{one['id']}", headers=bearer)).json()
                if found["events"][0].get("passed_by") == own_id:
                    return found
            return None

        passed = await until(there)
        assert passed is not None and passed["trace_id"] == own_id and passed["status"] == "done"
        [entry] = await until(lambda: _entries(stack, passed["id"]))
        assert entry.account == PEER and entry.units["output_tokens"] == 24
    assert refused.status_code == 503 and here.passed == {"served": 1}
    health = (await here.http.get("/health")).json()
    assert health["neighbours"] == {"listed": 1, "reachable": 1}
    page = (await here.http.get("/metrics")).text
    assert "serve_app_requests_passed_total{gateway=" in page and 'how="served"' in page
    shown = (await here.http.get("/v1/neighbours")).json()["neighbours"][0]
    assert shown["name"] == "paris" and shown["reachable"] and shown["latency_ms"] > 0


def _entries(stack: Any, request_id: str) -> list[Any]:
    """Of the stack's ledger."""
    with SqlStore(stack.home) as store:
        return store.usage.receipt(None, request_id)


async def test_streams_come_token_by_token_and_who_leaves_ends_them_there(edge, stack) -> None:
    here = await edge()
    await seen(here)
    body = ask(2, 40, stream=True, stream_options={"include_usage": True})
    text, frames, usage = "", 0, None
    async with here.http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line[6:])
                text += "".join(choice["text"] for choice in frame["choices"])
                frames += bool(frame["choices"])
                usage = frame.get("usage") or usage
    whole = await here.http.post("/v1/completions", json=ask(2, 40))
    assert text == whole.json()["choices"][0]["text"] and usage["completion_tokens"] == 40 and frames > 10
    # A client that leaves takes its request along.
    [model] = here.gateway.models
    events = await here.gateway.generate(model, _request(here, 400), here.gateway.own())
    await anext(events)
    await events.aclose()
    assert here.settled[-1].status == "left" and here.passed == {"served": 2, "left": 1}

    async def running() -> int:
        async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=60) as direct:
            told = (await direct.get("/v1/status")).json()["models"][CHAT]
            return int(told["inflight"])

    async with asyncio.timeout(60):
        while await running():
            await asyncio.sleep(0.05)


def _request(edge: Edge, tokens: int) -> Any:
    from serve_app.api.openai.read import parse_completions

    [model] = edge.gateway.models
    [request] = parse_completions(ask(3, tokens), edge.gateway.limits(model))
    return request


async def test_what_is_lost_there_goes_on_here_where_it_ended(edge, monkeypatch) -> None:
    here = await edge(workers=True)
    await seen(here)
    expected = (await here.http.post("/v1/completions", json=ask(4, 48))).json()["choices"][0]["text"]
    assert here.passed == {}  # nothing waits here, so all stays
    monkeypatch.setattr(here.gateway.engine.elsewhere._policy, "choose", _always)
    monkeypatch.setattr(here.gateway.engine.elsewhere, "_soon_here", lambda *_: False)
    read = Stream._more
    count = [0]

    async def breaks(stream: Stream) -> bool:
        count[0] += 1
        return False if count[0] > 6 else await read(stream)

    monkeypatch.setattr(Stream, "_more", breaks)
    answer = await here.http.post("/v1/completions", json=ask(4, 48))
    assert answer.json()["choices"][0]["text"] == expected
    assert answer.json()["usage"]["completion_tokens"] == 48
    events = await here.events(answer)
    assert 0 < events["neighbour lost"]["tokens"] < 48 and "routed" in events
    assert here.passed == {"lost": 1}
    assert [one.status for one in here.settled] == ["done", "done"]
    # What fails before the first token is served here as well: what is sent is no message of the other's version.
    monkeypatch.setattr(Stream, "_more", read)
    monkeypatch.setattr("serve_app.wire.neighbours.PassCall.encode", lambda _: b"\xc1")
    answer = await here.http.post("/v1/completions", json=ask(5))
    assert answer.status_code == 200 and here.passed == {"lost": 1, "refused": 1}
    events = await here.events(answer)
    assert events["not passed"]["why"] == "status 400" and "routed" in events
    # What is not passed: several answers, for one.
    assert (await here.http.post("/v1/completions", json=ask(6) | {"n": 2})).status_code == 200
    assert here.passed == {"lost": 1, "refused": 1}


def _always(own: Any, prompt: int, options: list[Any], left: Any = None) -> Any:
    from serve_app.routing.neighbours import Choice

    return Choice(options[0].name, 0.1)


async def test_prefixes_that_were_passed_are_found_again_and_nobody_elses(edge, stack) -> None:
    here = await edge()
    await seen(here)
    long = ask(7, 2, prompt="Once more: " + "join the list and sort the path " * 60)
    first = await here.http.post("/v1/completions", json=long)
    again = await here.http.post("/v1/completions", json=long)
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first.json()["usage"]["prompt_tokens"] > 256 and cached >= 256
    # Under the stack's own account the same prompt has never been there.
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=120) as direct:
        own = await direct.post("/v1/completions", json=long)
    assert own.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # The stack tells which prefixes it holds, and here they are recognised.
    [one] = here.gateway.engine.elsewhere._all
    await until(lambda: any(told.cached for told in one.told.values()), 60)


async def test_what_may_be_passed_is_bounded_by_the_limits_of_the_others_account(edge, stack) -> None:
    here = await edge()
    await seen(here)
    assert (await here.http.post("/v1/completions", json=ask(9))).status_code == 200
    with SqlStore(stack.home) as store:
        store.accounts.change(PEER, limits={"tokens_per_minute": 20})
    try:

        async def refused() -> bool:
            return (await here.http.post("/v1/completions", json=ask(9))).status_code == 503

        await until(refused)
        assert here.passed["refused"] > 0
    finally:
        with SqlStore(stack.home) as store:
            store.accounts.change(PEER, limits={"tokens_per_minute": None})


async def test_only_peers_are_told_and_only_they_pass(edge, stack, http) -> None:
    # The operator's own key is none of a cluster's.
    for answer in (http.get(f"{stack.url}{OFFERS}"), http.post(f"{stack.url}{PASS}", content=b"x")):
        assert answer.status_code == 403 and "SERVE_APP_PEERS" in answer.text
    here = await edge(key="no key of the stack's at all")
    await asyncio.sleep(0)
    await until(lambda: here.gateway.tally.neighbours.seen["paris"].why == "status 401", 60)
    assert (await here.http.post("/v1/completions", json=ask(8))).status_code == 503
    # This gateway lists no peers: not even its own operator may pass requests to it.
    client = Client("http://here", KEY, httpx.ASGITransport(build_http(here.gateway)))
    answer = await client._http.post(PASS, content=b"x")
    assert answer.status_code == 403 and "SERVE_APP_PEERS" in answer.text
    await client.aclose()
