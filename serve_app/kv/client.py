"""An engine worker's view of the shared cache: publish and fetch, where every failure is a miss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError

from serve_app.kv.chunk import BadChunk, ChunkMeta, Layout, Piece
from serve_app.kv.costs import FetchCosts
from serve_app.kv.directory import get_or_create_directory
from serve_app.kv.export import ExportBuffer
from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS
from serve_app.kv.news import PoolNews
from serve_app.kv.nodes import pool_name
from serve_app.kv.parts import check_read
from serve_app.kv.pool import NAMESPACE, PoolOptions, get_or_create_pool
from serve_app.kv.reading import ElsewhereFailed, ObjectReader, Read, Reader, moved, put_together, within
from serve_app.wire.parts import Part
from serve_app.wire.publish import ChunkFields, PublishCall

log = logging.getLogger(__name__)

# How long a pool that does not answer is waited for before it is asked again whether it is there.
ASK_AGAIN_S, PAUSE_S = 10.0, 0.2

Fetched = tuple[Piece, Read]


@dataclass(slots=True)
class ClientStats:
    """Counts since the start; tokens and bytes as received."""

    fetches: int = 0
    # From the node's pool, of which what its disk held, and from another node's.
    local_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    bytes_read: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0
    published_bytes: int = 0
    lookup_failures: int = 0
    read_failures: int = 0
    bad_chunks: int = 0
    publish_failures: int = 0
    published: int = 0
    pool_restarts: int = 0


class PoolAway(RuntimeError):
    """A pool that has not answered is not asked before it does."""


class KVClient:
    """Used from one event loop. ``layout`` is what the engine's own cache looks like: other chunks are
    misses.

    ``fetch`` asks the node's own pool, then ``from_node`` if given, then the best node the directory
    knows for what is still missing, if that is at least ``min_remote_tokens``. Nothing is fetched that is predicted to
    be computed sooner: see :mod:`serve_app.kv.costs`.

    A pool that was killed or hangs keeps nobody waiting but who has asked it just then: until it answers again it
    counts as empty.
    """

    def __init__(
        self,
        node_id: str,
        layout: Layout,
        options: PoolOptions = PoolOptions(),  # noqa: B008 - frozen
        *,
        timeout_s: float = 2.0,
        min_remote_tokens: int = CHUNK_TOKENS,
        costs: FetchCosts | None = None,
    ) -> None:
        self.stats = ClientStats()
        self.costs = costs or FetchCosts()
        # Seconds of prompts that the engine has to compute before another; and bytes that are being read.
        self.busy_s: Callable[[], float] = lambda: 0.0
        self._reading = 0
        self.reader: Reader = ObjectReader()
        self._node_id = node_id
        self._layout = layout
        self._options = options
        self._timeout_s = timeout_s
        self._min_remote_blocks = max(1, min_remote_tokens // BLOCK_TOKENS)
        self._pools: dict[str, Any] = {}
        # By node: waits until its pool answers again.
        self._away: dict[str, asyncio.Task[None]] = {}
        self._directory: Any = None
        # Finding and starting actors blocks.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kv-actors")

    @property
    def reading_tokens(self) -> int:
        """Whose K/V are being read."""
        return self.tokens(self._reading)

    @property
    def away(self) -> bool:
        """Whether the node's own pool does not answer at the moment."""
        return self._node_id in self._away

    def close(self) -> None:
        for task in self._away.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- publishing --------------------------------------------------------------------------------------------------

    async def announce(self, keys: Sequence[bytes], ttl_s: float = 30.0) -> None:
        """Lets readers on this node wait for keys that are being computed."""
        try:
            pool = await self._pool(self._node_id)
            await within(pool.announce.remote(list(keys), ttl_s), self._timeout_s)
        except Exception as error:
            self._lost(self._node_id, error)

    async def withdraw(self, keys: Sequence[bytes]) -> None:
        """Takes :meth:`announce` back, e.g. because the request was aborted."""
        try:
            pool = await self._pool(self._node_id)
            await within(pool.withdraw.remote(list(keys)), self._timeout_s)
        except Exception as error:
            self._lost(self._node_id, error)

    async def publish(
        self,
        metas: Sequence[ChunkMeta],
        exporter: Any,
        buffer: ExportBuffer | None = None,
        timeout_s: float = 30.0,
        others: Sequence[Any] = (),
        parts: tuple[Part, ...] = (),
    ) -> list[str]:
        """Has the node's pool pull chunks from ``exporter``, an actor handle with ``export_chunk(chunk_id)``, or
        ``parts`` of them from it and ``others``.

        Inside that actor: ``ray.get_runtime_context().current_actor``. Returns the ids the pool holds
        afterwards; whatever it did not come for is dropped from ``buffer``.
        """
        held: list[str] = []
        try:
            pool = await self._pool(self._node_id)
            chunks = tuple(ChunkFields(**meta.to_fields()) for meta in metas)
            if parts and _takes_parts(pool):
                told = pool.publish_parts.remote([exporter, *others], PublishCall(chunks, parts).encode())
            else:
                if parts and (buffer is None or not await put_together(metas, others, parts, buffer)):
                    self.stats.publish_failures += 1
                    return []
                told = pool.publish.remote(exporter, PublishCall(chunks).encode())
            held = await within(told, timeout_s)
            self.stats.published += len(held)
            self.stats.published_bytes += sum(meta.nbytes for meta in metas if meta.chunk_id in held)
        except Exception as error:
            self.stats.publish_failures += 1
            self._lost(self._node_id, error)
        if buffer is not None:
            buffer.discard(meta.chunk_id for meta in metas)
        return held

    async def touch(self, keys: Sequence[bytes], tail_keys: Sequence[bytes] = ()) -> int | None:
        """Tokens of a prompt, from the first on, that the node's pool holds, and keeps them fresh there; None if it
        does not answer.
        """
        try:
            pool = await self._pool(self._node_id)
            return await within(pool.touch.remote(list(keys), list(tail_keys)), self._timeout_s)
        except Exception as error:
            self.stats.lookup_failures += 1
            self._lost(self._node_id, error)
            return None

    async def news(self, since: int, wait_s: float) -> PoolNews:
        """What has gone from the node's own pool; see :meth:`KVPool.news`. Starts no pool. Raises what Ray raises, and
        ValueError where there is none.
        """
        pool = self._pools.get(self._node_id)
        if pool is None:
            pool = await self._blocking(ray.get_actor, pool_name(self._node_id), NAMESPACE)
            self._pools[self._node_id] = pool
        try:
            return await within(pool.news.remote(self._layout.name, since, wait_s), wait_s + self._timeout_s)
        except (RayActorError, TimeoutError) as error:
            self._lost(self._node_id, error)
            raise

    def tokens(self, nbytes: int) -> int:
        """Of K/V in so many bytes."""
        return nbytes * BLOCK_TOKENS // self._layout.block_bytes

    # -- reading ---------------------------------------------------------------------------------------------

    async def fetch(
        self,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes] = (),
        skip_tokens: int = 0,
        *,
        wait_s: float = 0.0,
        first: bool = False,
        from_node: str | None = None,
    ) -> list[Fetched]:
        """Gapless pieces of a prompt from token ``skip_tokens`` (a multiple of 32) on, with their
        chunks' payloads.

        ``keys`` name all full blocks of the prompt, ``tail_keys`` candidates for its partial last block.
        Payloads are read-only views into the object store, which stay valid as long as somebody holds
        them. Takes at most ``wait_s`` (for announced keys; ``first``: until there is any) plus the
        client's timeout, and never raises.
        """
        self.stats.fetches += 1
        if skip_tokens % BLOCK_TOKENS:
            raise ValueError(f"skip_tokens {skip_tokens} is not a multiple of {BLOCK_TOKENS}")
        start = skip_tokens // BLOCK_TOKENS
        deadline = time.monotonic() + wait_s + self._timeout_s
        asked = {self._node_id}
        wait_here = wait_s if from_node in (None, self._node_id) else 0.0
        found = await self._fetch_from(self._node_id, keys, tail_keys, start, wait_here, first, deadline)
        if from_node and from_node not in asked and not _complete(found, keys, tail_keys, start):
            asked.add(from_node)
            at = _end(found, start)
            found += await self._fetch_from(from_node, keys, tail_keys, at, wait_s, first, deadline)
        if self._options.use_directory and len(keys) - _end(found, start) >= self._min_remote_blocks:
            at = _end(found, start)
            node = await self._best_node(keys, tail_keys, at, asked, deadline)
            if node:
                found += await self._fetch_from(node, keys, tail_keys, at, 0.0, first, deadline)
        return found

    async def _fetch_from(
        self,
        node_id: str,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes],
        start: int,
        wait_s: float,
        first: bool,
        deadline: float,
    ) -> list[Fetched]:
        tier = "node" if node_id == self._node_id else "remote"
        at_most = (len(keys) - start) * BLOCK_TOKENS + (BLOCK_TOKENS - 1 if tail_keys else 0)
        nbytes = at_most * self._layout.block_bytes // BLOCK_TOKENS
        # What another engine computes for this prompt is not computed here as well, however long it takes.
        queued, busy_s = (self._reading, 0.0 if first else self.busy_s())
        if not self.costs.worth(tier, at_most, nbytes, queued, busy_s):
            return []
        try:
            pool = await self._pool(node_id)
            asked = (list(keys), list(tail_keys), start, wait_s, first, self.costs.token_seconds)
            call = pool.lookup.remote(*asked, **({"parted": True} if _takes_parts(pool) else {}))
            lease, pieces, refs = await within(call, deadline - time.monotonic())
        except Exception as error:
            self.stats.lookup_failures += 1
            self._lost(node_id, error)
            return []
        if not pieces:
            return []
        if tier == "remote":
            pieces = [replace(piece, tier=tier) for piece in pieces]
        started = time.perf_counter()
        reading = sum(piece.nbytes for piece in pieces)
        self._reading += reading
        try:
            payloads = await self.reader.read(refs, deadline)
        finally:
            self._reading -= reading
        read_s = time.perf_counter() - started
        pool.release.remote(lease)
        found: list[Fetched] = []
        for piece, payload in zip(pieces, payloads, strict=True):
            if isinstance(payload, BaseException):
                self.stats.read_failures += 1
            elif not self._usable(piece, payload):
                self.stats.bad_chunks += 1
            else:
                found.append((piece, payload))
                continue
            # A prefix with a gap is no prefix: the rest is a miss as well.
            log.info("chunk %s of node %s is lost or wrong: %r", piece.chunk_id, node_id, payload)
            if not isinstance(payload, TimeoutError | ElsewhereFailed):
                pool.report_bad.remote([piece.chunk_id])
            break
        self._count(found)
        self.costs.measured(tier, moved(found, pieces, payloads), read_s)
        return found

    def _count(self, found: list[Fetched]) -> None:
        for piece, _ in found:
            self.stats.bytes_read += piece.nbytes
            if piece.tier == "remote":
                self.stats.remote_tokens += piece.n_tokens
                self.stats.remote_bytes += piece.nbytes
            else:
                self.stats.local_tokens += piece.n_tokens
            if piece.tier == "disk":
                self.stats.disk_tokens += piece.n_tokens
                self.stats.disk_bytes += piece.nbytes

    def _usable(self, piece: Piece, payload: Read) -> bool:
        try:
            check_read(payload, piece.nbytes, piece.chunk_blocks)
        except BadChunk:
            return False
        inside = piece.first_block >= 0 and piece.first_block + piece.n_blocks <= piece.chunk_blocks
        return inside and self._layout.fits(piece)

    async def _best_node(
        self, keys: Sequence[bytes], tails: Sequence[bytes], start: int, asked: set[str], deadline: float
    ) -> str | None:
        try:
            if self._directory is None:
                self._directory = await self._blocking(get_or_create_directory)
            call = self._directory.best.remote(list(keys), list(tails), start, self._node_id, self._options.zone)
            nodes = await within(call, deadline - time.monotonic())
        except Exception as error:
            self.stats.lookup_failures += 1
            self._directory = None
            log.info("the directory does not answer: %r", error)
            return None
        return next((n for n, end in nodes if n not in asked and end - start >= self._min_remote_blocks), None)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _pool(self, node_id: str) -> Any:
        if node_id in self._away:
            raise PoolAway(node_id)
        pool = self._pools.get(node_id)
        if pool is None:
            if node_id == self._node_id:
                pool = await self._blocking(self._own_pool)
            else:
                pool = await self._blocking(ray.get_actor, pool_name(node_id), NAMESPACE)
            self._pools[node_id] = pool
        return pool

    def _own_pool(self) -> Any:
        return get_or_create_pool(self._node_id, self._options)

    def _lost(self, node_id: str, error: Exception) -> None:
        if isinstance(error, PoolAway):
            return
        log.info("the pool of node %s does not answer: %r", node_id, error)
        pool = self._pools.get(node_id)
        if isinstance(error, ActorDiedError):
            self._died(node_id, pool)
        elif isinstance(error, RayActorError | TimeoutError) and pool is not None and node_id not in self._away:
            self._away[node_id] = asyncio.get_running_loop().create_task(self._until_back(node_id, pool))

    def _died(self, node_id: str, pool: Any) -> None:
        """Dead for good: the next call starts another. One that is restarting keeps its handle."""
        if pool is not None and self._pools.get(node_id) is pool:
            del self._pools[node_id]
            self.stats.pool_restarts += 1

    async def _until_back(self, node_id: str, pool: Any) -> None:
        try:
            while True:
                try:
                    await within(pool.touch.remote([], []), ASK_AGAIN_S)
                    return
                except ActorDiedError:
                    self._died(node_id, pool)
                    return
                except (RayActorError, TimeoutError):
                    await asyncio.sleep(PAUSE_S)
        finally:
            del self._away[node_id]

    async def _blocking(self, function: Any, *args: Any) -> Any:
        call = asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        return await asyncio.wait_for(call, self._timeout_s + 5.0)


def _complete(found: list[Fetched], keys: Sequence[bytes], tail_keys: Sequence[bytes], start: int) -> bool:
    return _end(found, start) >= len(keys) + bool(tail_keys)


def _end(found: list[Fetched], start: int) -> int:
    """Blocks of the prompt covered, from its first token on; a tail is one."""
    return start + sum(piece.n_blocks for piece, _ in found)


def _takes_parts(pool: Any) -> bool:
    """Whether it knows chunks in several objects: a pool outlives an upgrade, with the code that it began with."""
    return hasattr(pool, "publish_parts")
