"""A pool that is lost or hangs: everything in it is a miss, nobody waits for it, and it comes back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import ray

from serve_app.kv.nodes import pool_name
from tests.kv.producing import alive, end, fetch, lost, produce, prompt
from tests.waiting import until, wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def test_a_killed_pool_is_a_miss_and_comes_back(client, node_id):
    tokens = prompt(256)
    await produce(client, tokens)
    ray.kill(ray.get_actor(pool_name(node_id), "serve_app"))
    wait_for(lambda: not alive(node_id))
    await until(lambda: lost(client, tokens))  # its name is free before its process has ended

    async def held() -> list:
        return (await produce(client, tokens))[2]

    await until(held)
    assert end(await fetch(client, tokens)) == 256
    assert client.stats.lookup_failures == 1 and client.stats.pool_restarts == 1


async def test_a_crashed_pool_restarts_empty(client, pool):
    tokens = prompt(256)
    worker, _, _ = await produce(client, tokens)
    ray.kill(pool, no_restart=False)
    # Killing takes a moment; what comes after it owns nothing.
    await until(lambda: lost(client, tokens))

    async def held() -> list:
        return (await produce(client, tokens, worker=worker))[2]

    await until(held)
    assert end(await fetch(client, tokens)) == 256


async def test_one_that_hangs_keeps_only_those_waiting_who_ask_first(client, pool):
    tokens = prompt(256)
    await produce(client, tokens)
    pid = await pool.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        client._timeout_s = 0.5
        assert await fetch(client, tokens) == [] and client.away
        # Whoever waited for it now would wait for an hour.
        client._timeout_s = 3600.0
        async with asyncio.timeout(60):
            assert await fetch(client, tokens) == []
            assert await client.touch([b"key"]) is None
            assert (await produce(client, tokens))[2] == []
    finally:
        os.kill(pid, signal.SIGCONT)

    async def back() -> bool:
        return not client.away

    await until(back)
    assert end(await fetch(client, tokens)) == 256


async def test_one_that_is_killed_is_known_to_be_away_before_anybody_asks(client, pool):
    tokens = prompt(256)
    worker, _, _ = await produce(client, tokens)
    told = await client.news(-1, 0.0)
    listening = asyncio.ensure_future(client.news(told.number, 600.0))
    pid = await pool.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        await listening
    assert client.away or await pool.__ray_call__.remote(lambda _: os.getpid()) != pid

    async def held() -> list:
        return (await produce(client, tokens, worker=worker))[2]

    await until(held)
    assert end(await fetch(client, tokens)) == 256
