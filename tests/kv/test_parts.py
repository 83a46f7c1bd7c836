"""Chunks whose parts several actors have, through a pool on a real Ray node."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from serve_app.kv.client import KVClient
from serve_app.kv.export import ExportBuffer
from serve_app.kv.keys import BLOCK_TOKENS
from serve_app.kv.nodes import pool_name
from serve_app.kv.parts import Payload, together
from serve_app.kv.pool import KVPool, PoolOptions, get_or_create_pool
from serve_app.wire.parts import Part, Run
from tests.kv.chunks import cut, payload, root
from tests.kv.producing import ALONE, BIG, MB, Worker, alive, end, fetch, prompt
from tests.waiting import until, wait_for

pytestmark = pytest.mark.usefixtures("ray_cluster")

# Of eight layers of four heads: two ranks with the heads of the first six, and one with the last two layers.
PARTS = (
    Part((Run(0, 6, 0, 2, 2, 256),)),
    Part((Run(0, 6, 2, 2, 2, 256),), away=True),
    Part((Run(6, 2, 0, 4, 2, 256),)),
)


def cut_up(meta) -> list[np.ndarray]:
    """What each has of a chunk."""
    whole = payload(meta).reshape(8, 2, meta.n_blocks, 4, BLOCK_TOKENS, 256)
    found = []
    for part in PARTS:
        (run,) = part.runs
        view = whole[run.layer : run.layer + run.layers, :, :, run.head : run.head + run.heads]
        found.append(np.ascontiguousarray(view).reshape(-1))
    return found


@ray.remote(num_cpus=0)
class Rank(Worker.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """A worker that has one of the parts."""

    def hold_parts(self, metas, index):
        for meta in metas:
            self.export_buffer.put(meta.chunk_id, cut_up(meta)[index])

    def make_one(self, chunk_id, data):
        self.export_buffer.put(chunk_id, data)


async def give(client, tokens, breakage=("", "", ""), **more):
    metas = cut(tokens, root(), BIG)
    ranks = [Rank.remote(each) for each in breakage]
    for index, rank in enumerate(ranks):
        await rank.hold_parts.remote(metas, index)
    return metas, ranks, await client.publish(metas, ranks[0], others=ranks[1:], parts=PARTS, **more)


def check_whole(found, metas):
    for (piece, read), meta in zip(found, metas, strict=True):
        assert piece.chunk_id == meta.chunk_id
        whole = together(read.parts, read.arrays, piece.chunk_blocks) if isinstance(read, Payload) else read
        assert np.array_equal(whole, payload(meta))


async def test_each_gives_its_part_and_all_are_read(client, pool):
    tokens = prompt(700)
    metas, ranks, held = await give(client, tokens)
    assert held == [meta.chunk_id for meta in metas]
    assert await ranks[1].waiting.remote() == 0
    for rank in ranks:
        ray.kill(rank)
    found = await fetch(client, tokens)
    assert end(found) == 700 and all(len(read.arrays) == 3 for _, read in found)
    check_whole(found, metas)
    assert not found[0][1].arrays[0].flags.writeable
    assert client.stats.bytes_read == sum(meta.nbytes for meta in metas) == (await pool.stats.remote())["bytes"]


async def test_who_needs_some_parts_reads_no_others(client):
    from serve_app.kv.reading import ObjectReader

    tokens = prompt(256)
    await give(client, tokens)
    client.reader = ObjectReader(lambda part: part.runs[0].layer == 6)
    [(_, read)] = await fetch(client, tokens)
    assert read.parts == PARTS[2:] and len(read.arrays) == 1


@pytest.mark.parametrize("breakage", [("", "short", ""), ("", "", "dies"), ("", "type", "")])
async def test_a_part_that_is_wrong_or_lost_is_a_miss(client, pool, breakage):
    tokens = prompt(256)
    _, _, held = await give(client, tokens, breakage)
    assert held == [] and await fetch(client, tokens) == []
    assert (await pool.stats.remote())["failed_exports"] == 1
    _, _, held = await give(client, tokens)
    assert len(held) == 1 and end(await fetch(client, tokens)) == 256


async def test_parts_that_are_no_whole_chunk_are_refused(client):
    tokens = prompt(256)
    metas = cut(tokens, root(), BIG)
    ranks = [Rank.remote(), Rank.remote()]
    assert await client.publish(metas, ranks[0], others=ranks[1:], parts=PARTS[:2]) == []
    assert await fetch(client, tokens) == []


async def test_readers_of_earlier_releases_are_given_whole_chunks_alone(client, pool):
    tokens = prompt(512)
    metas = cut(tokens, root(), BIG)
    worker = Worker.remote()
    await worker.make.remote(metas[:1])
    await client.publish(metas[:1], worker)
    ranks = [Rank.remote() for _ in PARTS]
    for index, rank in enumerate(ranks):
        await rank.hold_parts.remote(metas[1:], index)
    await client.publish(metas[1:], ranks[0], others=ranks[1:], parts=PARTS)
    keys = [key for meta in metas for key in meta.block_keys]
    _, pieces, refs = await pool.lookup.remote(keys)
    assert [piece.chunk_id for piece in pieces] == [metas[0].chunk_id] and len(refs) == 1
    _, pieces, refs = await pool.lookup.remote(keys, parted=True)
    assert len(pieces) == len(refs) == 2
    check_whole(await fetch(client, tokens), metas)


class EarlierPool:
    """A pool as the release before had it, which outlives an upgrade: it knows no parts."""

    def __init__(self, *told):
        self._pool = KVPool(*told)

    async def publish(self, exporter, call):
        return await self._pool.publish(exporter, call)

    async def lookup(self, keys, tail_keys=(), start_block=0, wait_s=0.0, first=False, token_seconds=0.0):
        return await self._pool.lookup(keys, tail_keys, start_block, wait_s, first, token_seconds)

    async def release(self, lease):
        await self._pool.release(lease)


async def test_a_pool_of_the_release_before_is_given_whole_chunks(node_id):
    actor = ray.remote(EarlierPool).options(
        name=pool_name(node_id), namespace="serve_app", num_cpus=0, max_concurrency=1000
    )
    kept = actor.remote(node_id, 100 * MB, ALONE)
    client = KVClient(node_id, BIG, ALONE)
    try:
        tokens = prompt(512)
        metas = cut(tokens, root(), BIG)
        ranks = [Rank.remote() for _ in PARTS]
        buffer = ExportBuffer(64 * MB)
        for meta in metas:
            buffer.put(meta.chunk_id, cut_up(meta)[0])
        for index, rank in enumerate(ranks):
            await rank.hold_parts.remote(metas, index)

        # What waits in the buffer is asked for in this process, whose stand-in is an actor.
        class Asked(ExportBuffer):
            def put(self, chunk_id, data):
                ray.get(ranks[0].make_one.remote(chunk_id, data))
                return True

        asked = Asked(64 * MB)
        asked.take = buffer.take
        held = await client.publish(metas, ranks[0], asked, others=ranks[1:], parts=PARTS)
        assert held == [meta.chunk_id for meta in metas]
        found = await fetch(client, tokens)
        assert all(isinstance(read, np.ndarray) for _, read in found)
        check_whole(found, metas)
    finally:
        client.close()
        ray.kill(kept)
        wait_for(lambda: not alive(node_id))


async def test_files_hold_whole_chunks(node_id, tmp_path):
    options = PoolOptions(
        25 * MB, use_directory=False, disk_directory=str(tmp_path), disk_bytes=80 * MB, disk_cold_s=0.2
    )
    pool = get_or_create_pool(node_id, options)
    client = KVClient(node_id, BIG, options)
    try:
        tokens = prompt(512)
        metas, _, _ = await give(client, tokens)

        async def written() -> bool:
            stats = (await pool.stats.remote())["disk"]
            return stats["chunks"] >= 2 and not stats["queued_bytes"]

        await until(written)
        # Others take its place in memory.
        for _ in range(4):
            await give(client, prompt(512))
        found = await fetch(client, tokens)
        assert {piece.tier for piece, _ in found} == {"disk"}
        assert all(isinstance(read, np.ndarray) for _, read in found)
        check_whole(found, metas)
    finally:
        client.close()
        ray.kill(ray.get_actor(pool_name(node_id), "serve_app"))
        wait_for(lambda: not alive(node_id))
