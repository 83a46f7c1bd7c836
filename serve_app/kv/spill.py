"""The pool's dealings with its files: what grows cold or is evicted is written in the background, and what is asked for
again comes back into the object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from serve_app.costs.transfers import Transfer
from serve_app.kv.chunk import BadChunk, ChunkMeta, Piece
from serve_app.kv.costs import PRIORS
from serve_app.kv.disk import DiskTier
from serve_app.kv.index import ChunkIndex, Evicted
from serve_app.kv.parts import Parted, together

log = logging.getLogger(__name__)

# A chunk is written when it has lain here so long, unless a longer one has taken its place by then.
COLD_S = 20.0
TICK_S = 1.0
# Evicted chunks that wait for the disk keep their memory; beyond this they are dropped.
QUEUE_BYTES = 64 << 20

# (added, removed): what the node holds, in whatever tier
Tell = Callable[[Sequence[ChunkMeta], Sequence[ChunkMeta]], None]


class Spill:
    """Lives on the pool's event loop; files are touched in threads. ``memory`` is the pool's index of objects."""

    def __init__(self, tier: DiskTier, memory: ChunkIndex, tell: Tell, cold_s: float = COLD_S) -> None:
        self.tier = tier
        self.reads = Transfer(*PRIORS["disk"])
        self.decisions: Counter[str] = Counter()
        self.dropped = 0
        self._memory = memory
        self._tell = tell
        self._cold_s = cold_s
        self._young: deque[tuple[float, ChunkMeta]] = deque()
        self._queue: deque[Evicted] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reading: dict[str, asyncio.Task[Any]] = {}

    def start(self) -> None:
        """Starts writing in the running loop; more than once is harmless."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    # -- writing -----------------------------------------------------------------------------------------------------

    def added(self, meta: ChunkMeta) -> None:
        """A chunk has come into memory."""
        self._young.append((time.monotonic() + self._cold_s, meta))

    def evicted(self, gone: Sequence[Evicted]) -> None:
        """Chunks have left memory; those that nothing replaced are written if the disk keeps up."""
        for one in gone:
            if one.replaced or self.tier.index.holds_all(one.meta.keys):
                continue
            if self._queued_bytes + one.meta.nbytes > QUEUE_BYTES:
                self.dropped += 1
                self._tell((), [one.meta])
                continue
            self._queue.append(one)
            self._queued_bytes += one.meta.nbytes
            self._wake.set()

    async def _run(self) -> None:
        await self._recover()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()
            while self._queue:
                gone = self._queue.popleft()
                await self._write(gone.meta, gone.value)
                self._queued_bytes -= gone.meta.nbytes
            now = time.monotonic()
            while self._young and self._young[0][0] <= now and not self._queue:
                _, meta = self._young.popleft()
                if meta.chunk_id in self._memory and not self._memory.replaced(meta.chunk_id):
                    await self._write(meta, self._memory.value(meta.chunk_id))

    async def _recover(self) -> None:
        """Takes over what an earlier pool has left."""
        found = await asyncio.to_thread(lambda: list(self.tier.scan()))
        for at, meta in enumerate(found):
            await self._delete(self.tier.recover(meta))
            if at % 100 == 99:
                await asyncio.sleep(0)
        held = [meta for meta in found if meta.chunk_id in self.tier.index]
        self._tell(held, ())
        if found:
            log.info("%d chunks (%d bytes) found on disk", len(held), self.tier.index.stats.bytes)

    async def _write(self, meta: ChunkMeta, ref: Any) -> None:
        evicted = None if self.tier.index.holds_all(meta.keys) else self.tier.begin(meta)
        if evicted is None:
            return
        written = False
        try:
            written = await asyncio.to_thread(self.tier.write, meta, await _payload(ref, meta.n_blocks))
        except Exception as error:  # a lost object
            log.info("chunk %s could not be written: %r", meta.chunk_id, error)
        self.tier.commit(meta, written)
        await self._delete(evicted)
        if written and meta.chunk_id not in self._memory:
            self._tell((meta,), ())

    async def _delete(self, metas: list[ChunkMeta]) -> None:
        if metas:
            self._tell((), [meta for meta in metas if meta.chunk_id not in self._memory])
            await asyncio.to_thread(self.tier.delete, metas)

    # -- reading -----------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], tail_keys: Sequence[bytes], start_block: int) -> list[Piece]:
        """As :meth:`ChunkIndex.match`, of what is on disk."""
        return [replace(piece, tier="disk") for piece in self.tier.index.match(keys, tail_keys, start_block)]

    def worth(self, pieces: Sequence[Piece], token_seconds: float) -> bool:
        """Whether reading is predicted to be cheaper than computing, at ``token_seconds`` each (0: unknown)."""
        tokens = sum(piece.n_tokens for piece in pieces)
        nbytes = sum({piece.chunk_id: piece.nbytes for piece in pieces if piece.tier == "disk"}.values())
        fetch = not token_seconds or self.reads.seconds(nbytes) < tokens * token_seconds
        self.decisions["fetch" if fetch else "computing is cheaper"] += 1
        return fetch

    async def bring(self, chunk_id: str) -> Any:
        """A reference to the chunk's payload, read from its file into the object store; None: a miss."""
        task = self._reading.get(chunk_id)
        if task is None:
            task = self._reading[chunk_id] = asyncio.ensure_future(self._read(chunk_id))
            task.add_done_callback(lambda _: self._reading.pop(chunk_id, None))
        return await asyncio.shield(task)

    async def _read(self, chunk_id: str) -> Any:
        meta = self.tier.index.meta(chunk_id)
        if meta is None:
            return None
        started = time.perf_counter()
        try:
            ref = await asyncio.to_thread(self._load, meta)
        except Exception as error:  # whatever it was, the chunk is not to be had
            log.info("chunk %s: %r", chunk_id, error)
            if isinstance(error, BadChunk) and self.tier.forget(chunk_id) is not None:
                await self._delete([meta])
            return None
        self.reads.add(meta.nbytes, time.perf_counter() - started)
        self.tier.stats.read += 1
        self.tier.stats.read_bytes += meta.nbytes
        evicted = self._memory.reserve(meta)
        if evicted is not None:
            self._memory.commit(meta, ref)
            self.evicted(evicted)
        return ref

    def _load(self, meta: ChunkMeta) -> Any:
        return ray.put(self.tier.read(meta))

    # -- about it ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sizes in bytes, the rest counts; see :class:`serve_app.kv.disk.DiskStats`."""
        return {
            "limit_bytes": self.tier.index.limit_bytes,
            **self.tier.counters(),
            "evicted": self.tier.index.stats.evicted,
            "dropped": self.dropped,
            "queued_bytes": self._queued_bytes,
            "read_mb_per_s": round(self.reads.per_s / 1e6, 1),
            "decisions": dict(self.decisions),
        }


async def _payload(value: Any, blocks: int) -> NDArray[np.uint8]:
    """In files chunks are whole."""
    if not isinstance(value, Parted):
        return await value
    arrays = [await ref for ref in value.refs]
    return await asyncio.to_thread(together, value.parts, arrays, blocks)
