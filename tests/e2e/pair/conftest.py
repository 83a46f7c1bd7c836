from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from serve_app.state.store.sql import SqlStore
from tests.e2e.pair.client import Client
from tests.e2e.pair.deployment import Pair, deployed


@pytest.fixture(scope="package")
def pair(stack, tmp_path_factory) -> Iterator[Pair]:
    with deployed(stack, tmp_path_factory.mktemp("pair")) as running:
        yield running


@pytest.fixture
def gateways(pair) -> list[str]:
    """Addresses of the two."""
    return pair.wait_ready()


@pytest.fixture
async def clients(pair):
    made: dict[str, Client] = {}

    async def make(name: str = "") -> Client:
        key = pair.key
        if name:
            with SqlStore(pair.home) as store:
                key = store.accounts.add(name)
        client = made[name] = Client(key)
        async with asyncio.timeout(60):
            for gateway in pair.gateways():
                while (await client.http.get(f"{gateway}/v1/models")).status_code == 401:
                    await asyncio.sleep(0.1)
        return client

    yield make
    for name, client in made.items():
        await client.http.aclose()
        if name:
            with SqlStore(pair.home) as store:
                store.accounts.remove(name)
