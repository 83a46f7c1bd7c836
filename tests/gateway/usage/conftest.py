"""A gateway whose store has some entries of two accounts, and clients with keys of several scopes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_app.gateway.core import Gateway
from serve_app.gateway.http.app import build_http
from serve_app.gateway.settings import GatewaySettings
from serve_app.state.callers.accounts import hash_key
from serve_app.state.spending.ledger import DAY_S, HOUR_S, Entry
from serve_app.state.store.sql import SqlStore

KEY = "the operator's key of this test alone"
CHAT, EMBED = "@cf/pico/pico-instruct", "@cf/sentence-transformers/all-minilm-l6-v2"
# 00:00 UTC, some days ago: entries that old are still kept.
START = (int(time.time()) // DAY_S - 5) * DAY_S


def entry(number: int, at: float, account: str = "local", **fields: Any) -> Entry:
    """One of 100 input tokens, 40 of them cached, and 10 output tokens: 2 neurons, 0.000022 dollars, half a second."""
    units = {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 10}
    known = {"key": "key1", "model": CHAT, "task": "text-generation", "status": "done", "units": units}
    money = {"neurons": 2_000_000, "money": 22_000, "currency": "USD"}
    return Entry(id=f"request{number}", account=account, at=START + at, seconds=0.5, **{**known, **money, **fields})


EMBEDDED = {"model": EMBED, "task": "text-embeddings", "units": {"input_tokens": 7}, "neurons": 500_000, "money": 5500}
ENTRIES = [
    entry(1, 10),
    entry(2, HOUR_S - 1),
    entry(3, HOUR_S, key="key2", status="left"),
    entry(4, DAY_S + 5 * HOUR_S, batch="batch1"),
    entry(5, DAY_S + 5 * HOUR_S + 901, **EMBEDDED),
    entry(6, 2 * DAY_S, currency="EUR", money=20_000),
    entry(7, 10, "team", key="key3"),
    entry(8, 2 * DAY_S + 1, "team", key="key3", status="failed"),
]


class Served:
    """``keys``: by what they may do: `team` reads its account, `admin` is an admin of it, `runs` may run models."""

    def __init__(self, gateway: Gateway, keys: dict[str, str]) -> None:
        self.gateway = gateway
        self.keys = keys | {"operator": KEY}
        self.transport = httpx.ASGITransport(build_http(gateway))

    async def call(self, method: str, path: str, who: str = "operator", **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.keys[who]}"}
        async with httpx.AsyncClient(transport=self.transport, base_url="http://here", headers=headers) as client:
            return await client.request(method, path, **more)

    async def get(self, path: str, who: str = "operator", **query: Any) -> Any:
        answer = await self.call("GET", path, who, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    with SqlStore(home) as store:
        store.open()
        store.write([made.row() for made in ENTRIES])
        scopes = {"team": {"read"}, "admin": {"read", "admin"}, "runs": {"inference"}}
        keys = {name: store.accounts.add("team", scopes=allowed) for name, allowed in scopes.items()}
    settings = {"account": "local", "key_hashes": (hash_key(KEY),), "cluster_secret": "s", "profile": "local"}

    async def nobody(*_: Any) -> Any:
        raise AssertionError("no worker was to be called")

    gateway = Gateway(GatewaySettings(home=str(home), **settings), nobody)
    asyncio.run(gateway.state.start())
    yield Served(gateway, keys)
    gateway.state.close()
