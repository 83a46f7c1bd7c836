"""The pool with files behind it, on a real Ray node."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from serve_app.kv.client import KVClient
from serve_app.kv.nodes import pool_name
from serve_app.kv.pool import PoolOptions, get_or_create_pool
from tests.kv.chunks import cut, payload, root
from tests.kv.producing import BIG, MB, Worker, alive, end, fetch, produce, prompt
from tests.waiting import until, wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def worker(ray_cluster):
    handle = Worker.remote()
    yield handle
    ray.kill(handle)


@pytest.fixture
def options(tmp_path):
    # Room for six chunks in memory; what has lain there for a second is written.
    return PoolOptions(25 * MB, use_directory=False, disk_directory=str(tmp_path), disk_bytes=80 * MB, disk_cold_s=0.5)


@pytest.fixture
def pool(node_id, options):
    handle = get_or_create_pool(node_id, options)
    yield handle
    ray.kill(ray.get_actor(pool_name(node_id), "serve_app"))
    wait_for(lambda: not alive(node_id))


@pytest.fixture
def client(node_id, options, pool):
    client = KVClient(node_id, BIG, options)
    yield client
    client.close()


async def on_disk(pool, chunks: int) -> dict:
    async def written() -> dict:
        stats = (await pool.stats.remote())["disk"]
        return stats if stats["chunks"] >= chunks and not stats["queued_bytes"] else {}

    return await until(written)


async def test_what_memory_cannot_hold_comes_back_from_disk(client, pool, worker):
    prompts = [prompt(512) for _ in range(6)]
    for tokens in prompts:
        await produce(client, tokens, worker=worker)
        await on_disk(pool, 0)
    await on_disk(pool, 12)
    for tokens in prompts:
        found = await fetch(client, tokens)
        assert end(found) == 512
        for (piece, data), meta in zip(found, cut(tokens, root(), BIG), strict=True):
            assert piece.chunk_id == meta.chunk_id and np.array_equal(data, payload(meta))
            assert not data.flags.writeable
    stats = await pool.stats.remote()
    assert client.stats.disk_tokens >= 3 * 512 and client.stats.local_tokens == 6 * 512
    assert stats["hits"]["disk_tokens"] == client.stats.disk_tokens
    assert stats["hits"]["disk_bytes"] == client.stats.disk_bytes == stats["disk"]["read_bytes"]
    assert stats["pulled_bytes"] == client.stats.published_bytes
    assert stats["bytes"] <= 25 * MB and stats["disk"]["read"] * 256 == client.stats.disk_tokens


async def is_new(pool) -> bool:
    """Whether a pool that was killed has died and come back: until then it answers from its memory."""
    try:
        return (await pool.stats.remote())["pulled_bytes"] == 0
    except ray.exceptions.RayActorError:
        return False


async def test_a_restarted_pool_finds_its_files(client, pool, worker, node_id):
    tokens = prompt(700)
    _, metas, _ = await produce(client, tokens, worker=worker)
    await on_disk(pool, 3)
    ray.kill(pool, no_restart=False)
    await until(lambda: is_new(pool))

    async def all_of_it() -> list:
        found = await fetch(client, tokens)
        return found if end(found) == 700 else []

    found = await until(all_of_it)
    # A new pool has nothing but the files; what an earlier look-up of the loop has read is in memory again.
    assert {piece.tier for piece, _ in found} <= {"disk", "node"}
    assert np.array_equal(found[2][1], payload(metas[2]))
    # They are in memory again.
    assert {piece.tier for piece, _ in await fetch(client, tokens)} == {"node"}


async def test_damaged_and_missing_files_are_misses(client, pool, worker, tmp_path):
    tokens = prompt(700)
    _, metas, _ = await produce(client, tokens, worker=worker)
    await on_disk(pool, 3)
    paths = [next(tmp_path.rglob(meta.chunk_id + ".kv")) for meta in metas]
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    for _ in range(3):
        await produce(client, prompt(512), worker=worker)
    assert end(await fetch(client, tokens)) == 256
    assert not paths[1].exists()
    paths[0].unlink()
    for _ in range(3):
        await produce(client, prompt(512), worker=worker)
    assert await fetch(client, tokens) == []
    await produce(client, tokens, worker=worker)
    assert end(await fetch(client, tokens)) == 700


async def test_a_file_is_not_read_if_computing_is_cheaper(client, pool, worker):
    tokens = prompt(512)
    await produce(client, tokens, worker=worker)
    await on_disk(pool, 2)
    for _ in range(3):
        await produce(client, prompt(512), worker=worker)
    client.costs.prefill.add(10**7, 1.0)
    assert await fetch(client, tokens) == []
    client.costs.decisions.clear()
    # The node's own pool is asked all the same where its memory is fast enough; the disk is not.
    client.costs.tiers["node"].add(10**15, 1.0)
    assert await fetch(client, tokens) == []
    assert client.costs.decisions == {"node: fetch": 1}
    assert (await pool.stats.remote())["disk"]["decisions"] == {"computing is cheaper": 1}
    client.costs.prefill.add(1, 10**9)
    assert end(await fetch(client, tokens)) == 512


async def test_one_tenants_flood_leaves_the_others_chunks(client, pool, worker):
    light = prompt(512)
    metas = cut(light, root(), BIG, tenant=b"light")
    await worker.make.remote(metas)
    assert len(await client.publish(metas, worker)) == 2
    for _ in range(8):
        flood = cut(prompt(512), root("hostile"), BIG, tenant=b"hostile")
        await worker.make.remote(flood)
        await client.publish(flood, worker)
    # Half of the pool's six chunks is shared out between the two of them: one and a half each.
    found = await fetch(client, light)
    assert found[0][0].tier == "node"
    stats = await pool.stats.remote()
    assert stats["tenants"] == 2 and stats["evicted"] > 0
