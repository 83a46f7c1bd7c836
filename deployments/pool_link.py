"""A worker's dealings with the pool: what is stored of a prompt, and sending out what its engine computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from serve_app.kv.client import Fetched, KVClient
from serve_app.kv.export import ExportBuffer
from serve_app.kv.keys import BLOCK_TOKENS, block_keys, tail_key

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine
    from serve_app.engine.loop import EngineLoop
    from serve_app.engine.request import Request
    from serve_app.engine.transfer import StoredPrefix


@dataclass(slots=True)
class Stored:
    """What there is of a prompt: ``prefix`` is what the engine's own cache lacks and the pool has; ``covered`` tokens
    are in either, ``held`` (from the first on) in the node's pool.
    """

    prefix: StoredPrefix | None
    covered: int
    held: int


class PoolLink:
    """Lives on the worker's event loop, except for :meth:`emit`, which the engine's thread calls."""

    def __init__(self, client: KVClient, exports: ExportBuffer, export_wait_s: float) -> None:
        self.client = client
        self.exports = exports
        self._export_wait_s = export_wait_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: dict[str, list[asyncio.Task[None]]] = {}
        # Waiting for a device's copies must not hold the event loop up.
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="kv-copies")

    def attach(self, engine: Engine, engine_loop: EngineLoop) -> None:
        """Whose prompts these are."""
        self._engine, self._engine_loop = engine, engine_loop

    # -- reading -------------------------------------------------------------------------------------------------------

    async def stored(self, request: Request) -> Stored:
        """Looks into the engine's own cache, then into the pool, and sets the request's keys."""
        from serve_app.engine.transfer import StoredPrefix

        self._loop = asyncio.get_running_loop()
        wanted = len(request.tokens) - (0 if request.prefill_only else 1)
        tail_keys = _name(request, wanted)
        # Reading the index from another thread is safe (the GIL) and a stale answer is only a hint.
        own = len(self._engine.scheduler.blocks.match(request.keys)) * BLOCK_TOKENS
        if own >= wanted and not request.prefill_only:
            self._background(self._correct(request.id, request.keys))
            return Stored(None, own, own)
        held, found = await asyncio.gather(
            self.client.touch(request.keys, tail_keys) if own else _nothing(),
            self.client.fetch(request.keys, tail_keys, own) if own < wanted else _nothing(),
        )
        pieces = [self._piece(one) for one in found or ()]
        prefix = StoredPrefix(pieces) if pieces else None
        end = prefix.end if prefix is not None else 0
        return Stored(prefix, min(wanted, max(own, end)), held or 0 if own else end)

    def _piece(self, fetched: Fetched) -> Any:
        import torch

        from serve_app.engine.transfer import Piece

        piece, view = fetched
        data = torch.from_numpy(view).view(self._engine.runner.kv.dtype).view(piece.shape)
        data = data[:, :, piece.first_block : piece.first_block + piece.n_blocks]
        return Piece(piece.start_token, piece.n_tokens, data)

    async def _correct(self, request_id: str, keys: list[bytes]) -> None:
        """Tells the exporter what the pool has forgotten of a prompt that this engine still holds."""
        held = await self.client.touch(keys)
        if held is not None:
            self._engine_loop.call(lambda engine: engine.export_from(request_id, held))

    # -- publishing ----------------------------------------------------------------------------------------------------

    def emit(self, request_id: str, meta: Any, copy: Callable[[], np.ndarray]) -> None:
        """Takes a chunk from the engine's thread. What is on its way to the pool is bounded: beyond that chunks are
        dropped, after a wait where publishing is what the worker is for.
        """
        if self._loop is not None and self.exports.begin(meta.nbytes, self._export_wait_s):
            self._loop.call_soon_threadsafe(self._publish, request_id, meta, copy)

    async def published(self, request_id: str) -> None:
        """Waits until the pool has what the engine has emitted for a request so far."""
        await asyncio.gather(*self._publishing.get(request_id, ()))

    def _publish(self, request_id: str, meta: Any, copy: Callable[[], np.ndarray]) -> None:
        task = self._background(self._hand_over(meta, copy))
        self._publishing.setdefault(request_id, []).append(task)
        task.add_done_callback(lambda done: self._published(request_id, done))

    def _published(self, request_id: str, task: asyncio.Task[None]) -> None:
        tasks = self._publishing[request_id]
        tasks.remove(task)
        if not tasks:
            del self._publishing[request_id]

    async def _hand_over(self, meta: Any, copy: Callable[[], np.ndarray]) -> None:
        """Puts the copy where the pool will fetch it, and tells the pool."""
        try:
            payload = await asyncio.get_running_loop().run_in_executor(self._copies, copy)
            self.exports.put(meta.chunk_id, payload)
            await self.client.publish([meta], ray.get_runtime_context().current_actor, self.exports)
        finally:
            self.exports.end(meta.nbytes)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _name(request: Request, wanted: int) -> list[bytes]:
    """Sets the keys of the full blocks among the first ``wanted`` tokens; returns the key of what is left over."""
    request.keys = block_keys(request.root, np.array(request.tokens[:wanted], np.int32))
    tail = request.tokens[len(request.keys) * BLOCK_TOKENS : wanted]
    parent = request.keys[-1] if request.keys else request.root
    return [tail_key(parent, np.array(tail, np.int32))] if tail else []


async def _nothing() -> None:
    return None
