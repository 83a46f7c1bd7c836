"""Two nodes with one PostgreSQL, through HTTP, and its server stopped and started under use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from serve_app.api.errors import OutOfCapacity, StoreAway
from serve_app.cli import main
from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import Caller, hash_key
from tests.state.gateways import OWN
from tests.waiting import until

CHAT = "@cf/pico/pico-instruct"


async def nobody(*_):
    """In place of the workers: every call finds them full."""
    raise OutOfCapacity


@pytest.fixture
def url(postgres_server) -> str:
    made = postgres_server.create()
    yield made
    postgres_server.drop(made)


@asynccontextmanager
async def node(home: Path, database: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    settings = GatewaySettings(
        account="local",
        key_hashes=(hash_key(OWN),),
        cluster_secret="s",
        home=str(home),
        profile="gpu",
        database=database,
        rate_limits={"text-generation": 1000},
    )
    gateway = Gateway(settings, nobody)
    await gateway.state.start()
    await gateway.inbox.start()
    transport = httpx.ASGITransport(build_http(gateway))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            yield gateway, client
    finally:
        await gateway.inbox.aclose()
        await asyncio.to_thread(gateway.state.close)


async def status(client: httpx.AsyncClient, key: str, path: str = "/v1/models") -> int:
    return (await client.get(path, headers={"Authorization": f"Bearer {key}"})).status_code


async def reach(
    client: httpx.AsyncClient, key: str, wanted: int, *, path: str = "/v1/models", meanwhile: int | None = None
) -> None:
    """Asks until the answer is the wanted one; before, it is ``meanwhile`` or, of a key, the other of its two."""
    async with asyncio.timeout(60):
        while (found := await status(client, key, path)) != wanted:
            assert found in ((200, 401) if meanwhile is None else (meanwhile,))
            await asyncio.sleep(0.05)


async def test_a_key_of_one_node_opens_the_other_until_it_is_revoked(url, tmp_path, monkeypatch, capsys):
    def on(home: str, *command: str) -> str:
        """The command line, on a node."""
        monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path / home))
        monkeypatch.setenv("SERVE_APP_DATABASE", url)
        assert main(list(command)) == 0
        return capsys.readouterr().out.strip()

    async with node(tmp_path / "one", url) as (_, one), node(tmp_path / "two", url) as (_, two):
        key = await asyncio.to_thread(on, "one", "accounts", "add", "team-a")
        await reach(two, key, 200)
        await reach(one, key, 200)
        assert "team-a" in await asyncio.to_thread(on, "two", "accounts", "list")
        await asyncio.to_thread(on, "two", "accounts", "remove", "team-a", "--key", hash_key(key)[:12])
        await reach(one, key, 401)
        await reach(two, key, 401)
        assert await status(one, OWN) == 200
    # Nothing but what a node has for itself lies in its own directory.
    assert not list(tmp_path.rglob("*.sqlite3"))


async def test_the_server_stops_and_starts_under_use(postgres_server, url, tmp_path):
    async with node(tmp_path / "one", url) as (gateway, one), node(tmp_path / "two", url) as (_, two):
        state = gateway.state
        key = await asyncio.to_thread(state._store.accounts.add, "team-a")
        await reach(one, key, 200)
        await reach(two, key, 200)
        ended = asyncio.Event()
        stored: list[str] = []
        read: list[str] = []

        async def use() -> None:
            """Keys are looked up, limits counted, responses and traces written all the time."""
            while not ended.is_set():
                # No faster than what is written meanwhile can be taken by the store when it is back.
                await asyncio.sleep(0.1)
                assert await status(one, key) == 200
                await state.allowance.request(Caller("team-a"), "reranking")
                body = {"id": f"resp_{len(stored)}", "previous_response_id": stored[-1] if stored else None}
                await state.responses.put("team-a", body, [{"role": "user", "content": body["id"]}])
                stored.append(body["id"])
                state.traces.end(state.traces.begin(f"r{len(stored)}", "team-a", "m"), "done")
                try:
                    assert await state.responses.get("team-a", stored[-1])
                    read.append(stored[-1])
                except StoreAway:
                    # The server had taken it when it stopped.
                    await asyncio.sleep(0)

        using = asyncio.create_task(use())

        async def reads(more: int) -> None:
            """Until so many more have been stored and read; raises what use has met."""
            before = len(read)
            await until(lambda: using.done() or len(read) > before + more)
            if using.done():
                await using

        await reads(5)
        await asyncio.to_thread(postgres_server.stop)
        try:
            await until(lambda: state.health()["status"] == "away")
            await reads(8)
            told = (await one.get("/health")).json()["store"]
            assert told["status"] == "away" and state.counters()["journal_bytes"] > 0
            operator = {"Authorization": f"Bearer {OWN}"}
            shown = (await one.get("/v1/status", headers=operator)).json()["gateway"]["store"]
            assert shown["waiting"] > 0 and shown["lost"] == 0 and "***" in shown["name"]
            # What lies in the store alone is neither there nor gone.
            elsewhere = await two.get(f"/v1/responses/{stored[-1]}", headers={"Authorization": f"Bearer {key}"})
            assert elsewhere.status_code == 503 and elsewhere.headers["retry-after"]
        finally:
            await asyncio.to_thread(postgres_server.start)
        await until(lambda: state.health()["status"] == "ready")
        await reads(5)
        ended.set()
        await using
        await until(lambda: state.counters()["waiting"] == state.counters()["journal_bytes"] == 0)
        # Nothing was lost, and nothing is there twice.
        whole = await state.responses.conversation("team-a", stored[-1])
        assert [message["content"] for message in whole] == stored[-1000:]
        assert state.counters()["lost"] == 0
        # The other node learns by itself that the server is back.
        await reach(two, key, 200, path=f"/v1/requests/r{len(stored)}", meanwhile=503)
