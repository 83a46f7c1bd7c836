"""The shared cache on one node: publishing, finding and reading chunks between two workers.

``python -m benchmarks kv [--mib 4] [--rounds 20] [--json]``. Starts a small private Ray. Two worker actors, one that
computes (here: random bytes) and one that reads; the pool between them is the product's own. ``disk_...``: a chunk's
file written, and read again with its checksum while the operating system still has it in memory; ``evict_us``: making
room in a full index of 10,000 chunks of 100 tenants.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = (1, 4, 16)


def keys_seconds(tokens: int) -> float:
    """Best of ten: the key chain of a prompt of ``tokens`` tokens."""
    from serve_app.kv.keys import block_keys, root_key

    root = root_key("benchmark", "float32", "layout", "", b"salt")
    ids = np.arange(tokens, dtype=np.int32)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        block_keys(root, ids)
        best = min(best, time.perf_counter() - started)
    return best


def chunk_of(mib: int, number: int, tenant: bytes = b"") -> Any:
    """A chunk of 256 tokens of 8 layers and 8 heads of float16; the head size makes it as large as asked for."""
    from serve_app.kv.chunk import ChunkMeta
    from serve_app.kv.keys import CHUNK_TOKENS, block_keys, root_key

    dim = mib * (1 << 20) // (8 * 2 * 8 * CHUNK_TOKENS * 2)
    root = root_key("benchmark", "float16", "layout", "", tenant or b"salt")
    keys = block_keys(root, np.arange(CHUNK_TOKENS, dtype=np.int32) + number * CHUNK_TOKENS)
    shape = (8, 2, CHUNK_TOKENS // 32, 8, 32, dim)
    return ChunkMeta.make(
        root=root, start_token=0, n_tokens=CHUNK_TOKENS, block_keys=keys, tail_key=None, shape=shape,
        dtype="float16", tenant=tenant,
    )  # fmt: skip


def disk_seconds(mib: int, rounds: int) -> dict[str, float]:
    """Medians of writing and reading one chunk's file."""
    from serve_app.kv.disk import DiskTier

    written, read = [], []
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        tier = DiskTier(Path(directory), 1 << 40)
        for number in range(rounds):
            meta = chunk_of(mib, number)
            data = np.random.default_rng(number).integers(0, 256, meta.nbytes, dtype=np.uint8)
            started = time.perf_counter()
            assert tier.begin(meta) == [] and tier.commit(meta, tier.write(meta, data))
            written.append(time.perf_counter() - started)
            started = time.perf_counter()
            assert tier.read(meta).nbytes == meta.nbytes
            read.append(time.perf_counter() - started)
        tier.close()
    return {"disk_write_ms": 1e3 * statistics.median(written), "disk_read_ms": 1e3 * statistics.median(read)}


def evict_seconds(chunks: int = 10_000, tenants: int = 100, rounds: int = 200) -> float:
    """Median of publishing one more chunk into a full index."""
    from serve_app.kv.index import ChunkIndex

    index = ChunkIndex(chunks * chunk_of(1, 0).nbytes)
    taken = []
    for number in range(chunks + rounds):
        meta = chunk_of(1, number, b"%d" % (number % tenants))
        started = time.perf_counter()
        assert index.reserve(meta) is not None and index.commit(meta, None)
        if number >= chunks:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def worker_class(mib: int) -> Any:
    import ray

    from serve_app.kv.chunk import ChunkMeta, Layout
    from serve_app.kv.client import KVClient
    from serve_app.kv.export import ExportBuffer
    from serve_app.kv.keys import CHUNK_TOKENS, block_keys, root_key
    from serve_app.kv.pool import PoolOptions

    # 256 tokens of 8 layers and 8 heads of float16; the head size makes the chunk as large as asked for.
    layers, heads = 8, 8
    dim = mib * (1 << 20) // (layers * 2 * heads * CHUNK_TOKENS * 2)
    layout = Layout(layers, heads, dim, "float16")

    @ray.remote(num_cpus=0, max_concurrency=16)
    class Worker:
        def __init__(self) -> None:
            self.exports = ExportBuffer(1 << 30)
            self.client = KVClient(ray.get_runtime_context().get_node_id(), layout, PoolOptions(use_directory=False))

        async def export_chunk(self, chunk_id: str) -> np.ndarray:
            return self.exports.take(chunk_id)

        async def publish(self, seed: int, count: int) -> float:
            metas = []
            for meta in self._metas(seed, count):
                self.exports.put(meta.chunk_id, np.full(meta.nbytes, seed % 251, np.uint8))
                metas.append(meta)
            me = ray.get_runtime_context().current_actor
            started = time.perf_counter()
            held = await self.client.publish(metas, me, self.exports)
            assert len(held) == count, held
            return time.perf_counter() - started

        async def fetch(self, seed: int, count: int) -> float:
            keys = [key for meta in self._metas(seed, count) for key in meta.block_keys]
            started = time.perf_counter()
            found = await self.client.fetch(keys)
            seconds = time.perf_counter() - started
            assert sum(piece.n_tokens for piece, _ in found) == count * CHUNK_TOKENS
            assert all(not view.flags.owndata for _, view in found)
            return seconds

        def _metas(self, seed: int, count: int) -> list[ChunkMeta]:
            root = root_key("benchmark", "float16", layout.name, "", b"salt")
            ids = np.arange(count * CHUNK_TOKENS, dtype=np.int32) + seed * 1_000_000
            keys = block_keys(root, ids)
            per = CHUNK_TOKENS // 32
            shape = (layers, 2, per, heads, 32, dim)
            return [
                ChunkMeta.make(
                    root=root, start_token=i * CHUNK_TOKENS, n_tokens=CHUNK_TOKENS,
                    block_keys=keys[i * per : (i + 1) * per], tail_key=None, shape=shape, dtype="float16",
                )
                for i in range(count)
            ]  # fmt: skip

    return Worker


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks kv", description=__doc__)
    parser.add_argument("--mib", type=int, default=4, help="size of a chunk")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nothing but this process reaches this Ray's work
    import ray

    figures: dict[str, Any] = {"keys_65536_tokens_ms": 1000 * keys_seconds(65536)}
    figures |= disk_seconds(arguments.mib, arguments.rounds)
    figures["evict_us"] = 1e6 * evict_seconds()
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=2 << 30, namespace="serve_app",
        log_to_driver=False,
    )  # fmt: skip
    try:
        made = worker_class(arguments.mib)
        producer, reader = made.remote(), made.remote()
        seed = 0
        for count in COUNTS:
            published, fetched = [], []
            for _ in range(arguments.rounds + 2):
                seed += 1
                published.append(ray.get(producer.publish.remote(seed, count)))
                fetched.append(ray.get(reader.fetch.remote(seed, count)))
            # The first two rounds start the pool and touch fresh pages.
            figures[f"publish_{count}_chunks_ms"] = 1000 * statistics.median(published[2:])
            figures[f"fetch_{count}_chunks_ms"] = 1000 * statistics.median(fetched[2:])
    finally:
        ray.shutdown()
    for name, value in figures.items():
        print(f"{name:24} {value:8.2f}")
    if arguments.json:
        print(json.dumps({"benchmark": "kv", "chunk_mib": arguments.mib, **figures}))


if __name__ == "__main__":
    main()
