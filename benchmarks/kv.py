"""The shared cache on one node: publishing, finding and reading chunks between two workers.

``python -m benchmarks kv [--mib 4] [--rounds 20] [--json]``. Starts a small private Ray. Two worker actors, one that
computes (here: random bytes) and one that reads; the pool between them is the product's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
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


def worker_class(mib: int) -> Any:
    import ray

    from serve_app.kv.chunk import ChunkMeta, Layout
    from serve_app.kv.client import KVClient
    from serve_app.kv.export import ExportBuffer
    from serve_app.kv.keys import CHUNK_TOKENS, block_keys, root_key

    # 256 tokens of 8 layers and 8 heads of float16; the head size makes the chunk as large as asked for.
    layers, heads = 8, 8
    dim = mib * (1 << 20) // (layers * 2 * heads * CHUNK_TOKENS * 2)
    layout = Layout(layers, heads, dim, "float16")

    @ray.remote(num_cpus=0, max_concurrency=16)
    class Worker:
        def __init__(self) -> None:
            self.exports = ExportBuffer(1 << 30)
            self.client = KVClient(ray.get_runtime_context().get_node_id(), layout, use_directory=False)

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
