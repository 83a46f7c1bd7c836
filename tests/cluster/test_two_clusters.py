"""Two clusters on one machine, each with its own Ray, store and workers: the busy one passes requests to the other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.stack import Server
from serve_app.state.store.sql import SqlStore
from tests.cluster.ray_start import ports
from tests.conftest import share_weights
from tests.waiting import until

MODEL = "@cf/pico/pico-instruct"
PORTS = (
    "PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)


def ask(n: int, tokens: int = 120) -> dict[str, Any]:
    content = f"Number {n}: what does itertools.chain do?"
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0}


def server(home: Path, found: list[int], **more: str) -> Server:
    home.mkdir()
    share_weights(home)
    numbers = dict(zip(PORTS, map(str, found), strict=True))
    sizes = {"SERVE_APP_OBJECT_STORE_BYTES": "256MiB", "SERVE_APP_KV_DISK_BYTES": "64MiB"}
    port = int(numbers.pop("PORT"))
    return Server(
        port, SERVE_APP_HOME=str(home), SERVE_APP_MODELS=MODEL, OMP_NUM_THREADS="1", **numbers, **sizes, **more
    )


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    for name in list(os.environ):
        if name.startswith(("RAY_", "SERVE_APP_")) or name == "PORT":
            monkeypatch.delenv(name)
    with ports(8) as free:
        first, second = free[:4], free[4:]
    with ExitStack() as ending:
        paris = server(tmp_path / "paris", second, SERVE_APP_PEERS="berlin")
        paris.start()
        ending.callback(paris.stop)
        with SqlStore(tmp_path / "paris") as store:
            key = store.accounts.add("berlin")
        listed = {"SERVE_APP_NEIGHBOURS": f"paris={paris.url}", "SERVE_APP_NEIGHBOUR_KEY_PARIS": key}

        berlin = server(tmp_path / "berlin", first, **listed)
        berlin.start()
        ending.callback(berlin.stop)
        yield berlin, paris


async def stream(http: httpx.AsyncClient, n: int, tokens: int = 120) -> str:
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json={**ask(n, tokens), "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                frame = json.loads(line[6:])
                assert "error" not in frame, frame
                text += "".join(choice["delta"].get("content") or "" for choice in frame["choices"])
    return text


def count(told: dict[str, Any], how: str) -> int:
    [one] = told["neighbours"]
    return sum(row["requests"] for row in one["passed"] if row["how"] == how)


@pytest.mark.slow
async def test_a_busy_cluster_passes_requests_and_the_loss_of_the_other_costs_no_answer(clusters) -> None:
    berlin, paris = clusters
    limits = httpx.Limits(max_connections=400)

    def client(of: Server) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {of.key}"}
        return httpx.AsyncClient(base_url=of.url, headers=headers, timeout=300, limits=limits)

    async with client(berlin) as here, client(paris) as there:

        async def told(http: httpx.AsyncClient) -> dict[str, Any]:
            return (await http.get("/v1/neighbours")).json()

        async def reachable() -> bool:
            return bool((await told(here))["neighbours"][0]["reachable"])

        await until(reachable, 120)
        expected = {n: await stream(there, n) for n in range(6)}
        assert all(expected.values())
        before = await told(here)
        assert count(before, "served") == 0  # nothing has been asked here yet
        # Until more waits than a first token may take: some go to the other cluster, and all say the same.
        many = 40
        while count(await told(here), "served") < 4 and many < 700:
            found = await asyncio.gather(*(stream(here, n % 6) for n in range(many)))
            assert all(text == expected[n % 6] for n, text in enumerate(found))
            many *= 2
        after = await told(here)
        served = count(after, "served")
        assert served >= 4, after
        received = (await told(there))["received"]
        assert [one["account"] for one in received] == ["berlin"] and received[0]["requests"] >= served
        # The other cluster ends in the middle of what was passed to it: its streams go on here.
        asking = [asyncio.create_task(stream(here, n % 6)) for n in range(many)]
        await until(lambda: _under_way(there), 120)
        await asyncio.to_thread(paris.stop)
        texts = await asyncio.gather(*asking)
        assert all(text == expected[n % 6] for n, text in enumerate(texts))
        health = (await here.get("/health")).json()
        assert health["status"] == "ready" and health["neighbours"]["listed"] == 1
        await until(lambda: _gone(here), 60)
        assert await stream(here, 3) == expected[3]


async def _under_way(http: httpx.AsyncClient) -> bool:
    """Whether passed requests run there."""
    told = (await http.get("/v1/status")).json()["models"][MODEL]
    return int(told["inflight"]) > 0


async def _gone(http: httpx.AsyncClient) -> bool:
    return (await http.get("/health")).json()["neighbours"]["reachable"] == 0
