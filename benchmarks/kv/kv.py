"""The shared cache on one node: publishing, finding and reading chunks between two workers, byte for byte.

``python -m benchmarks kv [--mib 4] [--rounds 20] [--json]``. Starts a small private Ray. Two worker actors, one that
computes (here: random bytes) and one that reads; the pool between them is the product's own. ``disk_...``: a chunk's
file written, and read again with its checksum while the operating system still has it in memory; ``evict_us``: making
room in a full index of 10,000 chunks of 100 tenants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import Checks
from benchmarks.serving.stack import bare_ray


def keys_seconds(tokens: int) -> float:
    """Best of ten: the key chain of a prompt of ``tokens`` tokens."""
    from serve_app.kv.keys import block_keys, root_key

    root = root_key(b"benchmark", "", b"salt")
    ids = np.arange(tokens, dtype=np.int32)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        block_keys(root, ids)
        best = min(best, time.perf_counter() - started)
    return best


def chunk_of(mib: int, number: int, tenant: bytes = b"") -> Any:
    """A chunk of 256 tokens of 8 layers and 8 heads of float16; the head size makes it as large as asked for."""
    from serve_app.kv.chunk import ChunkMeta, Layout
    from serve_app.kv.keys import CHUNK_TOKENS, block_keys, root_key

    dim = mib * (1 << 20) // (8 * 2 * 8 * CHUNK_TOKENS * 2)
    root = root_key(b"benchmark", "", tenant or b"salt")
    keys = block_keys(root, np.arange(CHUNK_TOKENS, dtype=np.int32) + number * CHUNK_TOKENS)
    layout = Layout.of([(8, dim)] * 8, "float16", 2)
    return ChunkMeta.make(
        root=root, start_token=0, n_tokens=CHUNK_TOKENS, block_keys=keys, tail_key=None, layout=layout,
        tenant=tenant,
    )  # fmt: skip


def disk_seconds(mib: int, rounds: int, checks: Checks) -> dict[str, float]:
    """Medians of writing and reading one chunk's file."""
    from serve_app.kv.disk import DiskTier

    written, read = [], []
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        tier = DiskTier(Path(directory), 1 << 40)
        for number in range(rounds):
            meta = chunk_of(mib, number)
            data = np.random.default_rng(number).integers(0, 256, meta.nbytes, dtype=np.uint8)
            started = time.perf_counter()
            kept = tier.begin(meta) == [] and tier.commit(meta, tier.write(meta, data))
            written.append(time.perf_counter() - started)
            started = time.perf_counter()
            found = tier.read(meta)
            read.append(time.perf_counter() - started)
            same = found is not None and np.array_equal(np.frombuffer(found, np.uint8), data)
            checks.that("a chunk's file", kept and same, "other bytes than were written")
        tier.close()
    return {"disk_write_ms": 1e3 * statistics.median(written), "disk_read_ms": 1e3 * statistics.median(read)}


def evict_seconds(checks: Checks, chunks: int, rounds: int = 200) -> float:
    """Median of publishing one more chunk into a full index of ``chunks``, of up to 100 tenants."""
    from serve_app.kv.index import ChunkIndex

    tenants = min(100, max(1, chunks // 10))
    index = ChunkIndex(chunks * chunk_of(1, 0).nbytes)
    taken = []
    for number in range(chunks + rounds):
        meta = chunk_of(1, number, b"%d" % (number % tenants))
        started = time.perf_counter()
        kept = index.reserve(meta) is not None and index.commit(meta, None)
        if number >= chunks:
            taken.append(time.perf_counter() - started)
        checks.that("a chunk for the index", bool(kept), "it found no room")
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
    layout = Layout.of([(heads, dim)] * layers, "float16", 2)

    @ray.remote(num_cpus=0, max_concurrency=16)
    class Worker:
        def __init__(self) -> None:
            self.exports = ExportBuffer(1 << 30)
            self.client = KVClient(ray.get_runtime_context().get_node_id(), layout, PoolOptions(use_directory=False))

        async def export_chunk(self, chunk_id: str) -> np.ndarray:
            return self.exports.take(chunk_id)

        async def publish(self, seed: int, count: int) -> tuple[float, int]:
            """Seconds, and how many chunks the pool has taken."""
            metas = []
            for meta in self._metas(seed, count):
                self.exports.put(meta.chunk_id, np.full(meta.nbytes, seed % 251, np.uint8))
                metas.append(meta)
            me = ray.get_runtime_context().current_actor
            started = time.perf_counter()
            held = await self.client.publish(metas, me, self.exports)
            return time.perf_counter() - started, len(held)

        async def fetch(self, seed: int, count: int) -> tuple[float, int]:
            """Seconds, and how many tokens' bytes were found, in shared memory and as they were published."""
            keys = [key for meta in self._metas(seed, count) for key in meta.block_keys]
            started = time.perf_counter()
            found = await self.client.fetch(keys)
            seconds = time.perf_counter() - started
            return seconds, sum(
                piece.n_tokens for piece, view in found if not view.flags.owndata and (view == seed % 251).all()
            )

        def _metas(self, seed: int, count: int) -> list[ChunkMeta]:
            root = root_key(b"benchmark", "", b"salt")
            ids = np.arange(count * CHUNK_TOKENS, dtype=np.int32) + seed * 1_000_000
            keys = block_keys(root, ids)
            per = CHUNK_TOKENS // 32
            return [
                ChunkMeta.make(
                    root=root, start_token=i * CHUNK_TOKENS, n_tokens=CHUNK_TOKENS,
                    block_keys=keys[i * per : (i + 1) * per], tail_key=None, layout=layout,
                )
                for i in range(count)
            ]  # fmt: skip

    return Worker


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks kv", description=__doc__)
    parser.add_argument("--mib", type=int, default=4, help="size of a chunk")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chunks", default="1,4,16", help="how many at a time")
    parser.add_argument("--index", type=int, default=10_000, help="chunks of the index that is full")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    checks = Checks()
    figures: dict[str, Any] = {"keys_65536_tokens_ms": 1000 * keys_seconds(65536)}
    figures |= disk_seconds(arguments.mib, arguments.rounds, checks)
    figures["evict_us"] = 1e6 * evict_seconds(checks, arguments.index)
    with bare_ray(2 << 30):
        import ray

        from serve_app.kv.keys import CHUNK_TOKENS

        made = worker_class(arguments.mib)
        producer, reader = made.remote(), made.remote()
        seed = 0
        for count in (int(c) for c in arguments.chunks.split(",")):
            published, fetched = [], []
            for _ in range(arguments.rounds + 2):
                seed += 1
                seconds, held = ray.get(producer.publish.remote(seed, count))
                checks.equal("chunks published", held, count)
                published.append(seconds)
                seconds, tokens = ray.get(reader.fetch.remote(seed, count))
                checks.equal("tokens fetched", tokens, count * CHUNK_TOKENS)
                fetched.append(seconds)
            # The first two rounds start the pool and touch fresh pages.
            figures[f"publish_{count}_chunks_ms"] = 1000 * statistics.median(published[2:])
            figures[f"fetch_{count}_chunks_ms"] = 1000 * statistics.median(fetched[2:])
        for worker in (producer, reader):
            ray.kill(worker)
    checks.require()
    for name, value in figures.items():
        print(f"{name:24} {value:8.2f}")
    if arguments.json:
        print(json.dumps({"benchmark": "kv", "chunk_mib": arguments.mib, **figures}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
