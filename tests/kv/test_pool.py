"""The pool, its clients and the directory on a real Ray node."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
import ray
from ray.exceptions import RayError

from serve_app.kv.client import KVClient
from serve_app.kv.directory import DirectoryFeed, get_or_create_directory
from serve_app.kv.directory_table import chunk_names
from serve_app.kv.nodes import object_store_bytes, pool_name
from serve_app.kv.pool import KVPool, PoolOptions, get_or_create_pool
from serve_app.wire.publish import ChunkFields, PublishCall
from tests.kv.chunks import LAYOUT, cut, payload, prompt_keys, root
from tests.kv.producing import ALONE, BIG, MB, Worker, alive, end, fetch, lost, produce, prompt
from tests.ray_private.names import object_store_summary
from tests.waiting import until, wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def test_chunks_outlive_the_worker_and_are_read_without_a_copy(client):
    tokens = prompt(700)
    worker, metas, held = await produce(client, tokens)
    assert held == [meta.chunk_id for meta in metas]
    assert await worker.waiting.remote() == 0
    pid_gone = ray.kill(worker)
    assert pid_gone is None
    found = await fetch(client, tokens)
    assert end(found) == 700
    for (piece, data), meta in zip(found, metas, strict=True):
        assert piece.chunk_id == meta.chunk_id
        assert np.array_equal(data, payload(meta))
        assert not data.flags.owndata and not data.flags.writeable
    assert client.stats.local_tokens == 700


async def test_part_of_a_prompt_and_part_of_a_chunk(client):
    tokens = prompt(700)
    await produce(client, tokens)
    other = tokens[:400] + prompt(50)
    found = await fetch(client, other, skip_tokens=64)
    assert [(p.start_token, p.end_token) for p, _ in found] == [(64, 256), (256, 384)]
    assert await fetch(client, prompt(300)) == []
    with pytest.raises(ValueError, match="multiple"):
        await fetch(client, tokens, skip_tokens=5)


async def test_touching_says_how_far_the_pool_goes_and_keeps_it_fresh(client, pool):
    old, other = prompt(300), prompt(256)
    worker, _, _ = await produce(client, old)
    await produce(client, other, worker=worker)
    keys, tails = prompt_keys(old, root())
    assert await client.touch(keys, tails) == 300
    assert await client.touch(keys) == 288 and await client.touch(prompt_keys(prompt(64), root())[0]) == 0
    for _ in range(12):
        await produce(client, prompt(512), worker=worker)
        await client.touch(keys, tails)
    assert await client.touch(keys, tails) == 300
    assert await fetch(client, other) == []


async def test_a_pool_tells_what_it_has_let_go_and_its_successor_is_another(pool, node_id):
    client = KVClient(node_id, BIG, ALONE, timeout_s=60)
    told = await client.news(-1, 0.0)
    assert told.keys == [] and client.tokens(told.limit_bytes) == 100 * MB * 256 // (4 * MB)
    old = prompt(256)
    worker, [meta], _ = await produce(client, old)
    number, gone = told.number, []
    async with asyncio.timeout(120):
        while meta.block_keys[-1] not in gone:
            await produce(client, prompt(1024), worker=worker)
            news = await client.news(number, 0.0)
            number, gone = news.number, gone + news.keys
    assert await fetch(client, old) == [] and news.incarnation == told.incarnation
    ray.kill(pool)
    # It starts none; the next one is another.
    async with asyncio.timeout(120):
        with pytest.raises((RayError, ValueError)):
            while True:
                await client.news(number, 0.0)
        while alive(node_id):
            await asyncio.sleep(0.05)
        get_or_create_pool(node_id, ALONE)
        while True:
            with contextlib.suppress(RayError, ValueError):
                assert (await client.news(-1, 0.0)).incarnation != told.incarnation
                return client.close()


async def test_two_workers_publish_the_same_keys(client, pool):
    tokens = prompt(512)
    a, b = Worker.remote(), Worker.remote()
    results = await asyncio.gather(produce(client, tokens, worker=a), produce(client, tokens, worker=b))
    stats = await pool.stats.remote()
    assert stats["chunks"] == 2 and stats["duplicates"] == 2
    assert stats["bytes"] == sum(meta.nbytes for meta in results[0][1])
    assert end(await fetch(client, tokens)) == 512


@pytest.mark.parametrize("breakage", ["short", "type", "dies"])
async def test_a_broken_export_is_a_miss(client, pool, breakage):
    tokens = prompt(256)
    _, _, held = await produce(client, tokens, worker=Worker.remote(breakage))
    assert held == []
    assert await fetch(client, tokens) == []
    stats = await pool.stats.remote()
    assert stats["failed_exports"] == 1 and stats["reserved"] == 0
    await produce(client, tokens)
    assert end(await fetch(client, tokens)) == 256


async def test_an_export_nobody_made_is_a_miss(client):
    metas = cut(prompt(256), root(), BIG)
    assert await client.publish(metas, Worker.remote()) == []


async def test_chunks_of_another_layout_are_misses(client, node_id, pool):
    tokens = prompt(256)
    await produce(client, tokens)
    other = KVClient(node_id, LAYOUT, ALONE)
    assert await fetch(other, tokens) == []
    assert other.stats.bad_chunks == 1
    other.close()


async def test_views_stay_good_when_their_chunk_is_evicted(client, pool):
    tokens = prompt(256)
    _, (meta,), _ = await produce(client, tokens)
    ((_, data),) = await fetch(client, tokens)
    await pool.report_bad.remote([meta.chunk_id])
    assert await fetch(client, tokens) == []
    await produce(client, prompt(2048))
    assert np.array_equal(data, payload(meta))


def used_bytes():
    stats = object_store_summary()
    for line in stats.splitlines():
        if line.startswith("Plasma memory usage"):
            return float(line.split()[3]) * MB
    raise AssertionError(stats)


async def test_least_recently_used_goes_first_and_memory_returns(client, pool):
    kept, lost = prompt(256), prompt(256)
    worker, _, _ = await produce(client, kept)
    await produce(client, lost, worker=worker)
    before = await asyncio.to_thread(used_bytes)
    for _ in range(14):
        await produce(client, prompt(512), worker=worker)
        assert end(await fetch(client, kept)) == 256
    assert await fetch(client, lost) == []
    stats = await pool.stats.remote()
    assert stats["evicted"] > 0 and stats["bytes"] <= 100 * MB
    # 100 MB of chunks at most, whatever was published, once the store has freed what was evicted.
    await until(lambda: asyncio.to_thread(lambda: used_bytes() <= before + 100 * MB))
    assert before < await asyncio.to_thread(used_bytes)
    await pool.report_bad.remote([m.chunk_id for m in cut(kept, root(), BIG)])
    # And everything comes back with the pool.
    ray.kill(pool)
    await until(lambda: asyncio.to_thread(lambda: used_bytes() < 30 * MB))
    wait_for(lambda: not alive(ray.get_runtime_context().get_node_id()))
    client._pools.clear()
    await client.announce([b"x"])


async def test_a_reader_waits_for_what_is_announced(client):
    tokens = prompt(512)
    keys, _ = prompt_keys(tokens, root())
    await client.announce(keys, ttl_s=300)
    reading = asyncio.create_task(fetch(client, tokens, wait_s=300))
    first = asyncio.create_task(fetch(client, tokens, wait_s=300, first=True))
    await asyncio.sleep(0.1)
    assert not reading.done() and not first.done()
    metas = cut(tokens, root(), BIG)
    worker = Worker.remote()
    await worker.make.remote(metas)
    await client.publish(metas[:1], worker)
    assert end(await first) == 256
    assert not reading.done()
    await client.publish(metas[1:], worker)
    assert end(await reading) == 512


async def test_waiting_ends_when_the_promise_is_taken_back_or_was_never_made(client):
    tokens = prompt(256)
    keys, _ = prompt_keys(tokens, root())
    started = time.monotonic()
    assert await fetch(client, tokens, wait_s=300) == []
    await client.announce(keys, ttl_s=300)
    reading = asyncio.create_task(fetch(client, tokens, wait_s=300))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await client.withdraw(keys)
    assert await reading == []
    await client.announce(keys, ttl_s=0.2)
    assert await fetch(client, tokens, wait_s=300) == []
    # Not a measurement: five minutes would mean that nothing woke the reader.
    assert time.monotonic() - started < 300


async def test_leases_are_returned(client, pool):
    tokens = prompt(256)
    await produce(client, tokens)
    await fetch(client, tokens)

    async def returned() -> bool:
        return (await pool.stats.remote())["leases"] == 0

    await until(returned)


def test_a_pool_must_leave_room_in_the_object_store(node_id):
    with pytest.raises(ValueError, match="object store"):
        get_or_create_pool(node_id, PoolOptions(limit_bytes=object_store_bytes(node_id)))
    with pytest.raises(ValueError, match="not alive"):
        get_or_create_pool("f" * 56)


async def test_another_nodes_pool_is_found_through_the_directory(node_id):
    # Two pools on one machine, the second under the name of a node that does not exist: what crosses nodes is
    # Ray's object transfer, what is ours is the finding.
    far_node = "e" * 56
    far = (
        ray.remote(KVPool)
        .options(name=pool_name(far_node), namespace="serve_app", num_cpus=0, max_concurrency=100)
        .remote(far_node, 50 * MB)
    )
    directory = get_or_create_directory()
    client = KVClient(node_id, BIG, PoolOptions(limit_bytes=50 * MB))
    try:
        tokens = prompt(700)
        metas = cut(tokens, root(), BIG)
        worker = Worker.remote()
        await worker.make.remote(metas)
        call = PublishCall(tuple(ChunkFields(**meta.to_fields()) for meta in metas))
        held = await far.publish.remote(worker, call.encode())
        assert len(held) == 3
        found = await until(lambda: fetch(client, tokens))
        assert end(found) == 700 and client.stats.remote_tokens == 700
        assert np.array_equal(found[2][1], payload(metas[2]))

        # The directory forgets everything: the pools fill the new one.
        ray.kill(directory, no_restart=False)
        assert end(await until(lambda: fetch(client, tokens))) == 700

        # A stale entry: the pool is gone, the directory does not know yet.
        ray.kill(far)
        # Killing takes a moment.
        await until(lambda: lost(client, tokens))
    finally:
        client.close()
        ray.kill(directory)
        ray.kill(ray.get_actor(pool_name(node_id), "serve_app"))
        wait_for(lambda: not alive(node_id))


async def test_a_feed_sends_everything_to_a_directory_it_does_not_know():
    directory = get_or_create_directory()
    metas = cut(prompt(700), root(), BIG)
    feed = DirectoryFeed("d" * 56, "pool", lambda: metas)
    feed.start()

    async def has(count: int) -> bool:
        return (await directory.stats.remote())["names"] == count

    try:
        assert sum(len(chunk_names(m)) for m in metas) == 4
        await until(lambda: has(4))
        feed.changed([], metas[:1])
        await until(lambda: has(3))
    finally:
        feed._task.cancel()
        ray.kill(directory)
