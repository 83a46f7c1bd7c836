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
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import structs

from serve_app import logs
from serve_app.kv.chunk import BadChunk, ChunkMeta, Piece
from serve_app.kv.directory import DirectoryFeed
from serve_app.kv.disk import DiskTier
from serve_app.kv.index import GUARANTEED, ChunkIndex, Evicted, Pins
from serve_app.kv.news import Departures, PoolNews
from serve_app.kv.nodes import object_store_bytes, pool_name
from serve_app.kv.parts import Parted, check_parts
from serve_app.kv.reading import pulled
from serve_app.kv.spill import COLD_S, Spill
from serve_app.ray_private.node_actors import NAMESPACE as NAMESPACE
from serve_app.ray_private.node_actors import leaving, may_go, of_node
from serve_app.wire.parts import Part
from serve_app.wire.publish import read_publish_call

log = logging.getLogger(__name__)

# Of the node's object store. Ray spills to disk from 80 % on, and readers' references keep evicted
# chunks a while.
DEFAULT_SHARE = 0.70
MAX_SHARE = 0.75


@dataclass(slots=True, frozen=True)
class PoolOptions:
    """What an operator decides about pools. ``limit_bytes`` None is 70 % of the node's object store; ``disk_bytes`` 0
    turns files off; ``guaranteed`` is the part of either that is shared out equally among the active tenants.
    """

    limit_bytes: int | None = None
    use_directory: bool = True
    zone: str = ""  # of the node
    disk_directory: str = ""
    disk_bytes: int = 0
    disk_cold_s: float = COLD_S
    guaranteed: float = GUARANTEED


# lease, pieces, one reference per piece or what stands for several
Lookup = tuple[int, list[Piece], list[Any]]


class KVPool:
    """Runs as an async actor; every method may be called concurrently. See :func:`get_or_create_pool`."""

    def __init__(
        self,
        node_id: str,
        limit_bytes: int,
        options: PoolOptions = PoolOptions(),  # noqa: B008 - frozen
        *,
        export_timeout_s: float = 30.0,
        lease_s: float = 10.0,
        concurrent_exports: int = 4,
        may_leave: bool = False,
    ) -> None:
        logs.set_up("kv pool")
        self._may_leave = may_leave
        self._leaving: asyncio.Task[None] | None = None
        self._node_id = node_id
        self._index = ChunkIndex(limit_bytes, options.guaranteed)
        self._export_timeout_s = export_timeout_s
        self._lease_s = lease_s
        self._exports = asyncio.Semaphore(concurrent_exports)
        self._parted_exports = asyncio.Semaphore(4 * concurrent_exports)
        self._failed_exports = 0
        self._pulled_bytes = 0
        # Keys whose chunks are being pulled, and keys somebody promised (with the time the promise lapses).
        self._in_flight: Counter[bytes] = Counter()
        self._announced: dict[bytes, float] = {}
        self._changed = asyncio.Event()
        self._leases: dict[int, tuple[float, Pins]] = {}
        self._next_lease = 1
        self._incarnation = uuid.uuid4().hex
        self._departures = Departures()
        self._feed = (
            DirectoryFeed(node_id, self._incarnation, self._metas, options.zone) if options.use_directory else None
        )
        self._spill = self._open_files(options)
        self._hits: Counter[str] = Counter()

    def _open_files(self, options: PoolOptions) -> Spill | None:
        if not options.disk_bytes:
            return None
        try:
            tier = DiskTier(Path(options.disk_directory), options.disk_bytes, options.guaranteed)
        except OSError as error:
            log.warning("no files behind the pool: %s", error)
            return None
        return Spill(tier, self._index, self._tell, options.disk_cold_s)

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

    async def publish(self, exporter: Any, call: bytes) -> list[str]:
        """Pulls the chunks of a ``PublishCall`` from ``exporter`` (an actor handle) and returns the ids of those held
        afterwards.

        Missing ids were not needed (their keys are held already), found no room, or could not be had.
        """
        return await self.publish_parts([exporter], call)

    async def publish_parts(self, exporters: Sequence[Any], call: bytes) -> list[str]:
        """As :meth:`publish`, of chunks whose parts several exporters have."""
        self._start()
        told = read_publish_call(call)
        chunks = []
        for fields in told.chunks:
            try:
                meta = ChunkMeta.from_fields(structs.asdict(fields))
                if told.parts:
                    check_parts(told.parts, meta.nbytes // meta.n_blocks)
            except BadChunk as error:
                log.warning("refused to publish: %s", error)
                continue
            chunks.append(meta)
        for meta in chunks:
            self._in_flight.update(meta.keys)
        await asyncio.gather(*(self._pull(exporters, meta, told.parts) for meta in chunks))
        return [meta.chunk_id for meta in chunks if meta.chunk_id in self._index]

    async def _pull(self, exporters: Sequence[Any], meta: ChunkMeta, parts: tuple[Part, ...]) -> None:
        try:
            # A rank may be in a step for some time, which keeps no other worker's chunks waiting.
            async with self._parted_exports if parts else self._exports:
                self._expire_leases()
                evicted = self._index.reserve(meta)
                if evicted is None:
                    return
                self._left_memory(evicted)
                try:
                    value = await asyncio.wait_for(pulled(exporters, meta, parts), self._export_timeout_s)
                except Exception as error:
                    # Whatever went wrong, including an arbitrary exception inside the worker, the chunk
                    # isn't there.
                    self._failed_exports += 1
                    log.info("chunk %s could not be pulled: %r", meta.chunk_id, error)
                    self._index.cancel(meta)
                    return
                self._index.commit(meta, value)
                self._pulled_bytes += meta.nbytes
                self._tell((meta,), ())
                if self._spill is not None:
                    self._spill.added(meta)
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
        token_seconds: float = 0.0,
        parted: bool = False,
    ) -> Lookup:
        """What the pool holds of a prompt from ``start_block`` on; see :meth:`ChunkIndex.match`. ``parted``: the reader
        takes chunks in several objects (:class:`Parted` among the references); readers of earlier releases do not.

        What lies in files is read if that is predicted to be cheaper than computing, which takes the reader
        ``token_seconds`` a token (0: it does not know).

        Waits up to ``wait_s`` seconds while the next missing key is announced or being pulled; with
        ``first`` only until there is anything. The chunks are pinned until :meth:`release` of the lease
        or until it lapses.
        """
        self._start()
        deadline = time.monotonic() + wait_s
        while True:
            pieces = self._match(keys, tail_keys, start_block, parted=parted)
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
        ids = dict.fromkeys(piece.chunk_id for piece in pieces if piece.tier == "node")
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = (time.monotonic() + self._lease_s, self._index.pin(ids))
        refs = {chunk_id: self._index.value(chunk_id) for chunk_id in ids}
        pieces, refs = await self._bring(pieces, refs, token_seconds)
        self._hits.update(_moved(pieces))
        return lease, pieces, [refs[piece.chunk_id] for piece in pieces]

    def _match(self, keys: Sequence[bytes], tail_keys: Sequence[bytes], at: int, *, parted: bool = True) -> list[Piece]:
        """Alternately from memory and from files, as far as they reach, and as far as chunks are of use to who asks."""
        pieces: list[Piece] = []
        while True:
            more = self._index.match(keys, tail_keys, at)
            if not parted:
                useful = list(takewhile(lambda p: not isinstance(self._index.value(p.chunk_id), Parted), more))
                if len(useful) < len(more):
                    return pieces + useful
            if not more and self._spill is not None:
                more = self._spill.match(keys, tail_keys, at)
            if not more:
                return pieces
            pieces += more
            at += sum(piece.n_blocks for piece in more)

    async def _bring(
        self, pieces: list[Piece], refs: dict[str, Any], token_seconds: float
    ) -> tuple[list[Piece], dict[str, Any]]:
        """Reads what lies in files, if it is worth it; without it the pieces behind it are of no use."""
        at = next((n for n, piece in enumerate(pieces) if piece.tier == "disk"), None)
        if at is None or self._spill is None:
            return pieces, refs
        if not self._spill.worth(pieces[at:], token_seconds):
            return pieces[:at], refs
        wanted = list(dict.fromkeys(piece.chunk_id for piece in pieces if piece.tier == "disk"))
        found = await asyncio.gather(*(self._spill.bring(chunk_id) for chunk_id in wanted))
        refs |= {chunk_id: ref for chunk_id, ref in zip(wanted, found, strict=True) if ref is not None}
        end = next((n for n, piece in enumerate(pieces) if piece.chunk_id not in refs), len(pieces))
        return pieces[:end], refs

    async def release(self, lease: int) -> None:
        """Unpins what :meth:`lookup` pinned. The reader's own references stay valid."""
        held = self._leases.pop(lease, None)
        if held is not None:
            self._index.unpin(held[1])

    async def touch(self, keys: Sequence[bytes], tail_keys: Sequence[bytes] = ()) -> int:
        """Tokens of a prompt, from the first on, that the pool holds; they become most recently used.

        For a reader whose engine has them as well: what is in use there must not grow old here.
        """
        pieces = self._match(keys, tail_keys, 0)
        return pieces[-1].end_token if pieces else 0

    async def report_bad(self, chunk_ids: Sequence[str]) -> None:
        """A reader could not use these (lost, or not what they claim to be): forget them."""
        removed = [meta for chunk_id in chunk_ids if (meta := self._index.remove(chunk_id))]
        self._tell((), [meta for meta in removed if not self._on_disk(meta)])

    async def news(self, layout: str, since: int = -1, wait_s: float = 0.0) -> PoolNews:
        """What has gone of the chunks of a layout since number ``since`` (-1: from now on). Waits up to ``wait_s``
        seconds for the first.
        """
        limit = self._index.limit_bytes + (self._spill.tier.index.limit_bytes if self._spill is not None else 0)
        return PoolNews(self._incarnation, limit, *await self._departures.since(since, layout, wait_s))

    async def stats(self) -> dict[str, Any]:
        """Sizes in bytes, the rest counts."""
        self._start()
        return {
            "node_id": self._node_id,
            "limit_bytes": self._index.limit_bytes,
            "failed_exports": self._failed_exports,
            "leases": len(self._leases),
            "announced": sum(until > time.monotonic() for until in self._announced.values()),
            **asdict(self._index.stats),
            "tenants": self._index.active_tenants,
            "hits": {"node_tokens": 0, "node_bytes": 0, "disk_tokens": 0, "disk_bytes": 0, **self._hits},
            "pulled_bytes": self._pulled_bytes,
            "disk": self._spill.stats() if self._spill is not None else None,
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

    def _left_memory(self, evicted: Sequence[Evicted]) -> None:
        gone = [one.meta for one in evicted if not self._on_disk(one.meta)]
        if self._spill is None:
            self._tell((), gone)
            return
        # What the disk has no time for is told by it.
        self._spill.evicted(evicted)
        self._tell_directory((), gone)

    def _on_disk(self, meta: ChunkMeta) -> bool:
        return self._spill is not None and meta.chunk_id in self._spill.tier.index

    def _metas(self) -> list[ChunkMeta]:
        held = {i: meta for i in self._index.chunk_ids if (meta := self._index.meta(i))}
        if self._spill is not None:
            files = self._spill.tier.index
            held |= {i: meta for i in files.chunk_ids if (meta := files.meta(i))}
        return list(held.values())

    def _tell(self, added: Sequence[ChunkMeta], removed: Sequence[ChunkMeta]) -> None:
        """Chunks have come, or are in no tier any more."""
        self._tell_directory(added, removed)
        if removed:
            self._departures.add(removed, self._holds)

    def _holds(self, key: bytes) -> bool:
        """Whether another chunk has it."""
        return self._index.holds_all([key]) or (self._spill is not None and self._spill.tier.index.holds_all([key]))

    def _tell_directory(self, added: Sequence[ChunkMeta], removed: Sequence[ChunkMeta]) -> None:
        if self._feed is not None:
            self._feed.changed(added, removed)

    def _start(self) -> None:
        # Not in __init__: the actor's loop runs coroutines only after construction, and again after a restart.
        if self._feed is not None:
            self._feed.start()
        if self._spill is not None:
            self._spill.start()
        if self._may_leave and self._leaving is None:
            self._leaving = leaving()


def _moved(pieces: Sequence[Piece]) -> Counter[str]:
    """Tokens and payload bytes by tier."""
    found: Counter[str] = Counter()
    for piece in pieces:
        found[f"{piece.tier}_tokens"] += piece.n_tokens
        found[f"{piece.tier}_bytes"] += piece.nbytes
    return found


def get_or_create_pool(node_id: str, options: PoolOptions = PoolOptions()) -> Any:  # noqa: B008 - frozen
    """Handle of the node's pool, which is started if need be. Blocks; in an event loop use a thread.

    A ``limit_bytes`` of more than 75 % of the node's object store is a ValueError. A pool that runs already keeps the
    options it was started with.
    """
    store = object_store_bytes(node_id)
    if not store:
        raise ValueError(f"node {node_id} is not alive or has no object store")
    limit_bytes = int(store * DEFAULT_SHARE) if options.limit_bytes is None else options.limit_bytes
    if limit_bytes > store * MAX_SHARE:
        raise ValueError(
            f"a pool of {limit_bytes} bytes is more than {MAX_SHARE:.0%} of the object store ({store} bytes)"
        )
    actor = of_node(KVPool, pool_name(node_id), node_id)
    return actor.remote(node_id, limit_bytes, options, may_leave=may_go(node_id))
