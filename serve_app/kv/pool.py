"""The shared cache of one node: a Ray actor that owns chunks in the node's object store.

The pool *pulls*: it calls ``export_chunk`` on the worker that made a chunk. A task's return value is
owned by the caller, so the chunk outlives the worker. Dropping the last reference frees the memory:
eviction is forgetting, and a reader that still holds a reference keeps its chunk. All trouble (a dead
worker, a lost object) ends as a miss.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.kv.chunk import BadChunk, ChunkMeta, Piece, payload_view
from serve_app.kv.directory import DirectoryFeed
from serve_app.kv.index import ChunkIndex, Pins

log = logging.getLogger(__name__)

NAMESPACE = "serve_app"
# Of the node's object store. Ray spills to disk from 80 % on, and readers' references keep evicted
# chunks a while.
DEFAULT_SHARE = 0.70
MAX_SHARE = 0.75

# lease, pieces, one reference per piece
Lookup = tuple[int, list[Piece], list[Any]]


class KVPool:
    """Runs as an async actor; every method may be called concurrently. See :func:`get_or_create_pool`."""

    def __init__(
        self,
        node_id: str,
        limit_bytes: int,
        *,
        use_directory: bool = True,
        export_timeout_s: float = 30.0,
        lease_s: float = 10.0,
        concurrent_exports: int = 4,
    ) -> None:
        self._node_id = node_id
        self._index = ChunkIndex(limit_bytes)
        self._export_timeout_s = export_timeout_s
        self._lease_s = lease_s
        self._exports = asyncio.Semaphore(concurrent_exports)
        self._failed_exports = 0
        # Keys whose chunks are being pulled, and keys somebody promised (with the time the promise lapses).
        self._in_flight: Counter[bytes] = Counter()
        self._announced: dict[bytes, float] = {}
        self._changed = asyncio.Event()
        self._leases: dict[int, tuple[float, Pins]] = {}
        self._next_lease = 1
        self._feed = DirectoryFeed(node_id, uuid.uuid4().hex, self._metas) if use_directory else None

    # -- publishing ------------------------------------------------------------------------------------------

    async def announce(self, keys: Sequence[bytes], ttl_s: float = 30.0) -> None:
        """Promises chunks with these keys, so that a reader may wait for them up to ``ttl_s`` seconds."""
        now = time.monotonic()
        if len(self._announced) > 100_000:
            self._announced = {key: until for key, until in self._announced.items() if until > now}
        self._announced.update((key, now + ttl_s) for key in keys)

    async def withdraw(self, keys: Sequence[bytes]) -> None:
        """Takes promises back; whoever waits for them stops waiting."""
        for key in keys:
            self._announced.pop(key, None)
        self._notify()

    async def publish(self, exporter: Any, metas: Sequence[dict[str, Any]]) -> list[str]:
        """Pulls chunks from ``exporter`` (an actor handle) and returns the ids of those held afterwards.

        Missing ids were not needed (their keys are held already), found no room, or could not be had.
        """
        self._start_feed()
        chunks = []
        for wire in metas:
            try:
                chunks.append(ChunkMeta.from_wire(wire))
            except BadChunk as error:
                log.warning("refused to publish: %s", error)
        for meta in chunks:
            self._in_flight.update(meta.keys)
        await asyncio.gather(*(self._pull(exporter, meta) for meta in chunks))
        return [meta.chunk_id for meta in chunks if meta.chunk_id in self._index]

    async def _pull(self, exporter: Any, meta: ChunkMeta) -> None:
        try:
            async with self._exports:
                self._expire_leases()
                evicted = self._index.reserve(meta)
                if evicted is None:
                    return
                self._tell_directory((), [gone.meta for gone in evicted])
                try:
                    ref = exporter.export_chunk.remote(meta.chunk_id)
                    payload = await asyncio.wait_for(_value(ref), self._export_timeout_s)
                    payload_view(meta.shape, meta.dtype, payload)
                except Exception as error:
                    # Whatever went wrong, including an arbitrary exception inside the worker, the chunk
                    # isn't there.
                    self._failed_exports += 1
                    log.info("chunk %s could not be pulled: %r", meta.chunk_id, error)
                    self._index.cancel(meta)
                    return
                self._index.commit(meta, ref)
                self._tell_directory((meta,), ())
        finally:
            self._in_flight.subtract(meta.keys)
            for key in meta.keys:
                self._announced.pop(key, None)
                if not self._in_flight[key]:
                    del self._in_flight[key]
            self._notify()

    # -- reading ---------------------------------------------------------------------------------------------

    async def lookup(
        self,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes] = (),
        start_block: int = 0,
        wait_s: float = 0.0,
        first: bool = False,
    ) -> Lookup:
        """What the pool holds of a prompt from ``start_block`` on; see :meth:`ChunkIndex.match`.

        Waits up to ``wait_s`` seconds while the next missing key is announced or being pulled; with
        ``first`` only until there is anything. The chunks are pinned until :meth:`release` of the lease
        or until it lapses.
        """
        deadline = time.monotonic() + wait_s
        while True:
            pieces = self._index.match(keys, tail_keys, start_block)
            left = deadline - time.monotonic()
            if left <= 0 or (first and pieces) or not self._coming(keys, tail_keys, pieces, start_block):
                break
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue
        if not pieces:
            return 0, [], []
        self._expire_leases()
        ids = dict.fromkeys(piece.chunk_id for piece in pieces)
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = (time.monotonic() + self._lease_s, self._index.pin(ids))
        return lease, pieces, [self._index.value(piece.chunk_id) for piece in pieces]

    async def release(self, lease: int) -> None:
        """Unpins what :meth:`lookup` pinned. The reader's own references stay valid."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._index.unpin(held[1])

    async def touch(self, keys: Sequence[bytes], tail_keys: Sequence[bytes] = ()) -> int:
        """Tokens of a prompt, from the first on, that the pool holds; they become most recently used.

        For a reader whose engine has them as well: what is in use there must not grow old here.
        """
        pieces = self._index.match(keys, tail_keys)
        return pieces[-1].end_token if pieces else 0

    async def report_bad(self, chunk_ids: Sequence[str]) -> None:
        """A reader could not use these (lost, or not what they claim to be): forget them."""
        removed = [meta for chunk_id in chunk_ids if (meta := self._index.remove(chunk_id))]
        self._tell_directory((), removed)

    async def stats(self) -> dict[str, Any]:
        """Sizes in bytes, the rest counts."""
        self._start_feed()
        return {
            "node_id": self._node_id,
            "limit_bytes": self._index.limit_bytes,
            "failed_exports": self._failed_exports,
            "leases": len(self._leases),
            "announced": sum(until > time.monotonic() for until in self._announced.values()),
            **asdict(self._index.stats),
        }

    # -- inside ----------------------------------------------------------------------------------------------

    def _coming(self, keys: Sequence[bytes], tails: Sequence[bytes], pieces: list[Piece], start_block: int) -> bool:
        covered = start_block + sum(piece.n_blocks for piece in pieces)
        if covered > len(keys):
            return False
        wanted = [keys[covered]] if covered < len(keys) else tails
        now = time.monotonic()
        return any(key in self._in_flight or self._announced.get(key, 0.0) > now for key in wanted)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _expire_leases(self) -> None:
        # Insertion order is order of expiry; a reader that died never releases.
        now = time.monotonic()
        for lease, (until, pins) in list(self._leases.items()):
            if until > now:
                break
            del self._leases[lease]
            self._index.unpin(pins)

    def _metas(self) -> list[ChunkMeta]:
        return [meta for chunk_id in self._index.chunk_ids if (meta := self._index.meta(chunk_id))]

    def _tell_directory(self, added: Sequence[ChunkMeta], removed: Sequence[ChunkMeta]) -> None:
        if self._feed is not None:
            self._feed.changed(added, removed)

    def _start_feed(self) -> None:
        # Not in __init__: the actor's loop runs coroutines only after construction, and again after a
        # restart.
        if self._feed is not None:
            self._feed.start()


async def _value(ref: Any) -> Any:
    return await ref


def pool_name(node_id: str) -> str:
    return f"kvpool:{node_id}"


def object_store_bytes(node_id: str) -> int:
    """Size of a node's object store; 0 if there is no such node."""
    for node in ray.nodes():
        if node["NodeID"] == node_id and node["Alive"]:
            return int(node["Resources"].get("object_store_memory", 0))
    return 0


def get_or_create_pool(node_id: str, limit_bytes: int | None = None, *, use_directory: bool = True) -> Any:
    """Handle of the node's pool, which is started if need be. Blocks; in an event loop use a thread.

    ``limit_bytes`` defaults to 70 % of the node's object store; more than 75 % is a ValueError.
    """
    store = object_store_bytes(node_id)
    if not store:
        raise ValueError(f"node {node_id} is not alive or has no object store")
    if limit_bytes is None:
        limit_bytes = int(store * DEFAULT_SHARE)
    if limit_bytes > store * MAX_SHARE:
        raise ValueError(
            f"a pool of {limit_bytes} bytes is more than {MAX_SHARE:.0%} of the object store ({store} bytes)"
        )
    actor = ray.remote(KVPool).options(
        name=pool_name(node_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return actor.remote(node_id, limit_bytes, use_directory=use_directory)
