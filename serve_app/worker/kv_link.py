"""A worker's dealings with the pool: what is stored of a prompt, and sending out what its engine computes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from serve_app.kv.client import Fetched, KVClient
from serve_app.kv.export import ExportBuffer
from serve_app.kv.keys import BLOCK_TOKENS, block_keys, tail_key
from serve_app.kv.sources import FOUND, SOURCES

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine
    from serve_app.engine.kv_io.transfer import StoredPrefix
    from serve_app.engine.loop import EngineLoop
    from serve_app.engine.request import Request


# How long keys count as promised, and a look into the pool waits for them, before others are asked as well.
PROMISE_S = 120.0
ARRIVAL_WAIT_S = 0.2
LAST_WORD_S = 1.0
# A prefill exists to publish: rather than drop its chunks, the engine waits so long for the pool to take others.
AWAITED_S = 2.0
_FARTHEST_LAST = ("node", "disk", "remote")


@dataclass(slots=True)
class Stored:
    """What there is of a prompt: ``prefix`` is what the engine's own cache lacks and the pool has; ``covered`` tokens
    are in either, ``held`` (from the first on) in the node's pool.
    """

    prefix: StoredPrefix | None
    covered: int
    held: int
    path: Path = field(default_factory=lambda: Path())


@dataclass(slots=True)
class Path:
    """What was taken from the pool for a prompt, as (tier, first token, end), and what that cost: bytes moved, those
    among them that moved while prefill was still computing, and the seconds between the end of prefill and the start
    here, which is what the client waits for.
    """

    taken: list[tuple[str, int, int]] = field(default_factory=list)
    bytes: int = 0
    early_bytes: int = 0
    handover_s: float = 0.0

    def took(self, found: list[Fetched], *, early: bool = False) -> None:
        for piece, _ in found:
            size = piece.nbytes // piece.chunk_blocks * piece.n_blocks
            self.taken.append((piece.tier, piece.start_token, piece.end_token))
            self.bytes += size
            self.early_bytes += size if early else 0

    def to_wire(self, prompt: int, present: int, cached: int, ttft_s: float | None) -> dict[str, Any]:
        """For the request's result, of whose ``prompt`` tokens the engine did not compute ``present``, and nobody did
        for this request ``cached``; ``handover_share`` is the hand-over's part of the time to first token.

        Each prompt token is counted once: where it was found (``own`` blocks, ``node``, ``disk``, ``remote``: together
        ``cached``), ``prefilled`` for this request by another worker, or ``computed`` here.
        """
        found = dict.fromkeys(FOUND, 0)
        for tier, start, end in self.taken:
            found[tier] += max(0, min(end, cached) - start)
        found["own"] = max(0, cached - sum(found.values()))
        share = round(self.handover_s / ttft_s, 4) if ttft_s else None
        return {
            **found,
            "prefilled": max(0, present - cached),
            "computed": max(0, prompt - present),
            "bytes": self.bytes,
            "early_bytes": self.early_bytes,
            "handover_s": round(self.handover_s, 6),
            "handover_share": share,
            "ttft_s": round(ttft_s, 6) if ttft_s else None,
        }


class PoolLink:
    """Lives on the worker's event loop, except for :meth:`emit`, which the engine's thread calls."""

    def __init__(self, client: KVClient, exports: ExportBuffer) -> None:
        self.client = client
        self.exports = exports
        # Requests somebody waits for the chunks of.
        self.awaited: set[str] = set()
        self.hits: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Tier, tokens and seconds of the latest fetches, for whoever predicts what the next one takes.
        self.fetches: deque[tuple[str, int, float]] = deque(maxlen=16)
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: dict[str, list[asyncio.Task[None]]] = {}
        # Waiting for a device's copies must not hold the event loop up.
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="kv-copies")

    def attach(self, engine: Engine, engine_loop: EngineLoop) -> None:
        """Whose prompts these are."""
        self._engine, self._engine_loop = engine, engine_loop
        self.client.costs.prefill = engine.meter.prefill

    def stats(self) -> dict[str, Any]:
        """Counts since the start: of the client, of prompts' tokens by tier, of bytes handed over, and what fetching
        and computing cost.
        """
        return {
            **asdict(self.client.stats),
            "dropped": self.exports.dropped,
            "hits": {**dict.fromkeys(SOURCES, 0), **self.hits},
            "costs": self.client.costs.report(),
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    def done(self, request: Request, stored: Stored, cached: int, ttft_s: float | None) -> dict[str, Any]:
        """What is told about a request that has ended; see :meth:`Path.to_wire`."""
        told = stored.path.to_wire(request.prompt_len, request.cached, cached, ttft_s)
        self.hits.update({source: told[source] for source in SOURCES})
        return told

    async def stored(self, request: Request) -> Stored:
        """Looks into the engine's own cache, then into the pool, and sets the request's keys."""
        from serve_app.engine.kv_io.transfer import StoredPrefix

        self._loop = asyncio.get_running_loop()
        wanted = len(request.tokens) - (0 if request.prefill_only else 1)
        tail_keys = _name(request, wanted)
        # Reading the index from another thread is safe (the GIL) and a stale answer is only a hint.
        own = len(self._engine.scheduler.blocks.match(request.keys)) * BLOCK_TOKENS
        if own >= wanted and not request.prefill_only:
            self._background(self._correct(request.id, request.keys))
            return Stored(None, own, own)
        began = time.perf_counter()
        held, found = await asyncio.gather(
            self.client.touch(request.keys, tail_keys) if own else _nothing(),
            self.client.fetch(request.keys, tail_keys, own) if own < wanted else _nothing(),
        )
        pieces = [self._piece(one) for one in found or ()]
        prefix = StoredPrefix(pieces) if pieces else None
        end = prefix.end if prefix is not None else 0
        stored = Stored(prefix, min(wanted, max(own, end)), held or 0 if own else end)
        stored.path.took(found or [])
        if found:
            # The farthest tier is what a fetch of several waits for.
            tier = max((piece.tier for piece, _ in found), key=_FARTHEST_LAST.index)
            self.fetches.append((tier, sum(piece.n_tokens for piece, _ in found), time.perf_counter() - began))
        return stored

    async def arriving(self, request: Request, prefilled: asyncio.Future[dict[str, Any]]) -> Stored:
        """Like :meth:`stored` while a prefill worker computes the prompt: takes chunks as they appear in the pool and
        copies them into the engine's cache between its steps, so that little is left to do when prefill has ended.

        ``prefilled`` says how it ended: ``{"cached", "node"}``, or ``{}`` if it failed, and then what is there is what
        there is. Whatever goes wrong, the engine computes what is missing.
        """
        from serve_app.engine.kv_io.transfer import StoredPrefix

        self._loop = asyncio.get_running_loop()
        wanted = len(request.tokens) - 1
        tail_keys = _name(request, wanted)
        own = len(self._engine.scheduler.blocks.match(request.keys)) * BLOCK_TOKENS
        pieces: list[Any] = []
        path = Path()
        promised = [*request.keys[own // BLOCK_TOKENS :], *tail_keys]
        await self.client.announce(promised, PROMISE_S)
        prefilled.add_done_callback(lambda _: self._background(self.client.withdraw(promised)))
        try:
            told_at = await self._take_over(request, tail_keys, own, wanted, prefilled, pieces, path)
            ended = told_at or time.perf_counter()  # all is here before the news that it is
            # It knows how much of the prompt was cached. If all is here and it does not say, somebody else computed it.
            await asyncio.wait([prefilled], timeout=LAST_WORD_S)
        finally:
            if not prefilled.done():
                prefilled.set_result({})
        path.handover_s = time.perf_counter() - ended
        own_now = len(self._engine.scheduler.blocks.match(request.keys)) * BLOCK_TOKENS
        if pieces and pieces[0].start > own_now:
            # What the engine held itself at first is gone.
            again = await self.stored(request)
            again.path = path
            return again
        end = pieces[-1].start + pieces[-1].tokens if pieces else own
        return Stored(StoredPrefix(pieces) if pieces else None, end, end, path)

    async def _take_over(
        self,
        request: Request,
        tail_keys: list[bytes],
        at: int,
        wanted: int,
        prefilled: asyncio.Future[dict[str, Any]],
        pieces: list[Any],
        path: Path,
    ) -> float:
        """Fills ``pieces`` from ``at`` on until they reach ``wanted`` or nothing more comes; says when prefill was
        seen to have ended (0: it has not).
        """
        from serve_app.engine.kv_io.preload import preload

        told_at = 0.0
        while at < wanted:
            over = prefilled.done()
            if over and not told_at:
                told_at = time.perf_counter()
            node = prefilled.result().get("node") if over else None
            found = await self.client.fetch(
                request.keys, tail_keys, at, wait_s=0.0 if over else ARRIVAL_WAIT_S, first=True, from_node=node
            )
            path.took(found, early=not prefilled.done())
            for one in found:
                piece = self._piece(one)
                pieces.append(piece)
                at = piece.start + piece.tokens
                # One at a time, each between two steps: streams that run meanwhile get their turn.
                await asyncio.wrap_future(self._engine_loop.call(partial(preload, keys=request.keys, piece=piece)))
            if not found and over:
                break
            if not found:
                await asyncio.wait([prefilled], timeout=ARRIVAL_WAIT_S)
        return told_at

    def _piece(self, fetched: Fetched) -> Any:
        import torch

        from serve_app.engine.kv_io.transfer import Piece

        piece, view = fetched
        return Piece(piece.start_token, piece.n_tokens, torch.from_numpy(view), piece.first_block)

    async def _correct(self, request_id: str, keys: list[bytes]) -> None:
        """Tells the exporter what the pool has forgotten of a prompt that this engine still holds."""
        held = await self.client.touch(keys)
        if held is not None:
            self._engine_loop.call(lambda engine: engine.export_from(request_id, held))

    # -- publishing ----------------------------------------------------------------------------------------------------

    def emit(self, request_id: str, meta: Any, copy: Callable[[], np.ndarray]) -> None:
        """Takes a chunk from the engine's thread. What is on its way to the pool is bounded: beyond that chunks are
        dropped, those of :attr:`awaited` requests only after a wait.
        """
        wait_s = AWAITED_S if request_id in self.awaited else 0.0
        if self._loop is not None and self.exports.begin(meta.nbytes, wait_s):
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
