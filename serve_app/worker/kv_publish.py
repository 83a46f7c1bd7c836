"""Sending out what an engine computes: from its thread through the export buffer into the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.client import KVClient
from serve_app.kv.export import ExportBuffer
from serve_app.kv.parts import block_bytes
from serve_app.worker.tasks import Tasks

if TYPE_CHECKING:
    from serve_app.worker.rank_store import Shared

# A prefill exists to publish: rather than drop its chunks, the engine waits so long for the pool to take others.
AWAITED_S = 2.0


class Publisher:
    """Lives on the worker's event loop, except for :meth:`admit` and :meth:`emit`, which the engine's thread calls.

    ``exporter()``: the actor that the pool asks for a chunk's bytes, or this rank's, by ``export_chunk(chunk_id)``.
    """

    def __init__(
        self,
        client: KVClient,
        exports: ExportBuffer,
        exporter: Callable[[], Any],
        states: KVClient | None = None,
    ) -> None:
        """``states``: asks for chunks of states, of a model that keeps any."""
        self.exports = exports
        self.states = states
        # How the worker's ranks share what they export.
        self.shared: Shared | None = None
        # Requests somebody waits for the chunks of.
        self.awaited: set[str] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.client = client
        self._exporter = exporter
        self._tasks = Tasks()
        self._publishing: dict[str, list[asyncio.Task[None]]] = {}
        # Waiting for a device's copies must not hold the event loop up.
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="kv-copies")

    def stats(self) -> dict[str, Any]:
        """Counts since the start: of the client, and of chunks that were dropped."""
        return {**asdict(self.client.stats), "dropped": self.exports.dropped}

    def admit(self, request_id: str, meta: ChunkMeta) -> bool:
        """Makes a place for a chunk, in the engine's thread. What is on its way to the pool is bounded: beyond that
        chunks are dropped, those of :attr:`awaited` requests only after a wait.
        """
        wait_s = AWAITED_S if request_id in self.awaited else 0.0
        return self.loop is not None and self.exports.begin(self._own_bytes(meta), wait_s)

    def emit(self, request_id: str, meta: ChunkMeta, copy: Callable[[], np.ndarray]) -> None:
        """Takes a chunk that was admitted from the engine's thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._publish, request_id, meta, copy)

    def _own_bytes(self, meta: ChunkMeta) -> int:
        """What of a chunk waits in this process."""
        shared = self._shared_of(meta)
        return meta.nbytes if shared is None else meta.n_blocks * block_bytes(shared.parts[0])

    def _shared_of(self, meta: ChunkMeta) -> Shared | None:
        """How the chunk is divided; None: not at all, as states are, which are rank 0's to give."""
        return self.shared if self.shared is not None and self.shared.layout == meta.layout else None

    async def published(self, request_id: str) -> None:
        """Waits until the pool has what the engine has emitted for a request so far."""
        await asyncio.gather(*self._publishing.get(request_id, ()))

    def _publish(self, request_id: str, meta: ChunkMeta, copy: Callable[[], np.ndarray]) -> None:
        task = self._tasks.start(self._hand_over(meta, copy))
        self._publishing.setdefault(request_id, []).append(task)
        task.add_done_callback(lambda done: self._published(request_id, done))

    def _published(self, request_id: str, task: asyncio.Task[None]) -> None:
        tasks = self._publishing[request_id]
        tasks.remove(task)
        if not tasks:
            del self._publishing[request_id]

    async def _hand_over(self, meta: ChunkMeta, copy: Callable[[], np.ndarray]) -> None:
        """Puts the copy where the pool will fetch it, and tells the pool."""
        shared = self._shared_of(meta)
        others, parts = ((), ()) if shared is None else (shared.others, shared.parts)
        try:
            payload = await asyncio.get_running_loop().run_in_executor(self._copies, copy)
            self.exports.put(meta.chunk_id, payload)
            held = await self.client.publish([meta], self._exporter(), self.exports, others=others, parts=parts)
            if meta.chunk_id not in held and others:
                forgotten = (other.forget.remote([meta.chunk_id]) for other in others)
                await asyncio.gather(*forgotten, return_exceptions=True)
        finally:
            self.exports.end(self._own_bytes(meta))
