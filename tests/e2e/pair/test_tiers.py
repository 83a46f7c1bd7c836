"""``cached_tokens`` tells every token that was found and none that was not, whatever tier it was found in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import ray
from ray.exceptions import RayError

from serve_app.kv.cached_tokens import FOUND
from serve_app.kv.nodes import pool_name
from serve_app.kv.pool import NAMESPACE, PoolOptions, get_or_create_pool
from tests.e2e.conftest import CHAT
from tests.e2e.pair.client import body, prompt, text
from tests.e2e.pair.deployment import BLOCKS

TOKENS = 15 * 32  # and one more, which is always computed
# A prompt is two chunks. The pool holds more of them than a worker's own cache, and fewer than the files.
CHUNK_BYTES = 8 * 6 * 2 * 2 * 64 * 4 * 32
IN_POOL, IN_WORKER = 12, BLOCKS // 15


async def small_pool(options: PoolOptions) -> Any:
    """This node's pool, replaced by one with other options."""
    node = ray.get_runtime_context().get_node_id()
    async with asyncio.timeout(60):
        while True:
            try:
                pool = await asyncio.to_thread(get_or_create_pool, node, options)
                stats = await pool.stats.remote()
                if options.limit_bytes in (None, stats["limit_bytes"]):
                    return pool
                ray.kill(ray.get_actor(pool_name(node), NAMESPACE), no_restart=True)
            except (RayError, ValueError):
                await asyncio.sleep(0.05)


@pytest.fixture
async def pool(stack, pair) -> AsyncIterator[Any]:
    files = {"use_directory": False, "disk_directory": str(pair.home / "kv"), "disk_bytes": 64 << 20}
    yield await small_pool(PoolOptions(limit_bytes=2 * IN_POOL * CHUNK_BYTES, **files))
    node = ray.get_runtime_context().get_node_id()
    ray.kill(ray.get_actor(pool_name(node), NAMESPACE), no_restart=True)
    # Every worker of the session's own stack notices with a request of its own, not with a later test's.
    async with httpx.AsyncClient(headers=stack.headers, timeout=60) as client:
        for n in range(2):
            asked = {"prompt": f"Where has the pool gone? {time.time()} {n}", "max_tokens": 4}
            assert (await client.post(f"{stack.api}/run/{CHAT}", json=asked)).status_code == 200


@pytest.mark.slow
async def test_cached_tokens_come_from_every_tier_of_a_node(pair, gateways, clients, pool):
    client = await clients()
    decoders: set[str] = set()

    async def ask(seed: int) -> tuple[str, dict[str, int]]:
        """The answer, and the prompt's tokens by where they came from, of which usage and path say the same."""
        asked = body(0, 12, prompt=prompt(seed, TOKENS + 1))
        answer = await client.ask(gateways[0], asked, **{"x-session-affinity": "tiers"})
        said = text(answer)
        usage, events = answer.json()["usage"], await client.path(gateways[1], answer)
        decoded = events["decoded"]
        decoders.add(decoded["replica"])
        found = {tier: decoded[tier] for tier in FOUND}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (
            cached == events["first token"]["cached_tokens"] == events["done"]["cached_tokens"] == sum(found.values())
        )
        assert usage["prompt_tokens"] == TOKENS + 1 == cached + decoded["prefilled"] + decoded["computed"]
        return said, {tier: count for tier, count in found.items() if count}

    async def walk(seed: int) -> tuple[list[dict[str, int]], int]:
        """Where one prompt was found after others had taken its place, tier by tier; chunks read from files."""
        read = (await pool.stats.remote())["disk"]["read"]
        first, found = await ask(seed)
        seen = [found]

        async def again() -> None:
            said, found = await ask(seed)
            assert said == first
            seen.append(found)

        await again()
        for other in range(1, IN_WORKER + 2):
            assert (await ask(seed + other))[1] == {}
        await again()
        await again()
        for other in range(100, 100 + IN_POOL + 1):
            assert (await ask(seed + other))[1] == {}
        async with asyncio.timeout(60):
            while (stats := await pool.stats.remote())["disk"]["queued_bytes"] or stats["disk"]["chunks"] < 2:
                await asyncio.sleep(0.05)
        await again()
        await again()
        return seen, (await pool.stats.remote())["disk"]["read"] - read

    # Requests fill the cache of the worker that decodes them. The planner may have another one decode at any time.
    for n in range(5):
        decoders.clear()
        seen, read = await walk(1000 * n)
        if len(decoders) == 1:
            break
    own = {"own": TOKENS}
    assert seen == [{}, own, {"node": TOKENS}, own, {"disk": TOKENS}, own], decoders
    assert read == 2  # once: read back, it is in memory again
