"""Which node holds which chunk: soft state, fed by the pools in batches. Wrong or stale only ever means
a miss.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

from serve_app import logs
from serve_app.costs.zones import distance
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS

log = logging.getLogger(__name__)

NAMESPACE = "serve_app"
NAME = "kvdirectory"
# 128 bits of a sha256: a collision is a miss at the pool, and half the memory is a lot at ten million keys.
NAME_BYTES = 16
INTERVAL_S = 0.1
HEARTBEAT_S = 2.0
NODE_TIMEOUT_S = 10.0
# What blocks are worth that come from the same zone, from the same region and from elsewhere.
WORTH = (1.0, 0.8, 0.5)
# Names per message when a whole pool is sent again.
BATCH = 20_000
_CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


def chunk_names(meta: ChunkMeta) -> list[bytes]:
    """A chunk is entered under its last full block and its tail: enough to find where it ends."""
    return [key[:NAME_BYTES] for key in (*meta.block_keys[-1:], *((meta.tail_key,) if meta.tail_key else ()))]


class DirectoryTable:
    """The data structure: chunk name -> set of nodes. Sets are interned, a name costs its bytes and a
    dict slot.

    A node is known by its pool's incarnation; what a dead one entered is ignored at once and swept later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[bytes, tuple[int, ...]] = {}
        self._sets: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._number: dict[tuple[str, str], int] = {}
        self._live: dict[int, tuple[str, float]] = {}
        self._next = 0
        self._zones: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def update(self, node_id: str, pool: str, added: Iterable[bytes], removed: Iterable[bytes], zone: str = "") -> bool:
        """Applies changes of a pool incarnation; True if it was unknown, i.e. should send all it holds."""
        self._zones[node_id] = zone
        number = self._number.get((node_id, pool))
        unknown = number is None or number not in self._live
        if number is None or unknown:
            for other in [n for n, (name, _) in self._live.items() if name == node_id]:
                del self._live[other]
            number = self._number[node_id, pool] = self._next
            self._next += 1
        self._live[number] = (node_id, self._clock() + NODE_TIMEOUT_S)
        for name in removed:
            self._set(name, tuple(n for n in self._nodes.get(name, ()) if n != number and n in self._live))
        for name in added:
            old = [n for n in self._nodes.get(name, ()) if n in self._live]
            self._set(name, tuple(sorted({*old, number})))
        return unknown

    def best(
        self,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes] = (),
        start_block: int = 0,
        exclude: str = "",
        zone: str = "",
    ) -> list[tuple[str, int]]:
        """(node id, blocks covered from the prompt's start) of nodes that hold more than
        ``start_block``, best first: those of ``zone`` before others that hold little more.

        A tail counts as one more block.
        """
        now = self._clock()
        live = {n: name for n, (name, until) in self._live.items() if until > now and name != exclude}
        ends: dict[int, int] = {}
        for at in range(start_block, len(keys)):
            for number in self._nodes.get(keys[at][:NAME_BYTES], ()):
                # Only the chunk's end is entered; it may begin up to eight blocks earlier.
                if number in live and at + 1 - ends.get(number, start_block) <= _CHUNK_BLOCKS:
                    ends[number] = at + 1
        for key in tail_keys:
            for number in self._nodes.get(key[:NAME_BYTES], ()):
                if number in live and len(keys) - ends.get(number, start_block) < _CHUNK_BLOCKS:
                    ends[number] = len(keys) + 1

        def worth(found: tuple[str, int]) -> float:
            node, end = found
            return (end - start_block) * WORTH[distance(zone, self._zones.get(node, ""))]

        return sorted(((live[n], end) for n, end in ends.items()), key=worth, reverse=True)

    def expire(self) -> bool:
        """Drops nodes that went silent; True if there is something to sweep."""
        now = self._clock()
        for number in [n for n, (_, until) in self._live.items() if until <= now]:
            del self._live[number]
        dead = [pair for pair, number in self._number.items() if number not in self._live]
        for pair in dead:
            del self._number[pair]
        here = {name for name, _ in self._live.values()}
        self._zones = {node: zone for node, zone in self._zones.items() if node in here}
        return bool(dead)

    def sweep(self, names: Iterable[bytes]) -> None:
        """Removes dead nodes from the given names."""
        for name in names:
            self._set(name, tuple(n for n in self._nodes.get(name, ()) if n in self._live))

    def names(self) -> list[bytes]:
        return list(self._nodes)

    @property
    def nodes(self) -> list[str]:
        return sorted(name for name, _ in self._live.values())

    def _set(self, name: bytes, nodes: tuple[int, ...]) -> None:
        if nodes:
            self._nodes[name] = self._sets.setdefault(nodes, nodes)
        else:
            self._nodes.pop(name, None)


class KVDirectory:
    """The actor around the table. One for the cluster; restarts empty and is filled again by the pools."""

    def __init__(self) -> None:
        logs.set_up("kv directory")
        self._table = DirectoryTable()
        self._incarnation = uuid.uuid4().hex
        self._sweeper: asyncio.Task[None] | None = None

    async def update(
        self, node_id: str, pool: str, added: Sequence[bytes], removed: Sequence[bytes], zone: str = ""
    ) -> tuple[str, bool]:
        """(incarnation of the directory, whether it wants everything again)."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return self._incarnation, self._table.update(node_id, pool, added, removed, zone)

    async def best(
        self,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes] = (),
        start_block: int = 0,
        exclude: str = "",
        zone: str = "",
    ) -> list[tuple[str, int]]:
        """See :meth:`DirectoryTable.best`."""
        return self._table.best(keys, tail_keys, start_block, exclude, zone)

    async def stats(self) -> dict[str, Any]:
        return {"names": len(self._table), "nodes": self._table.nodes}

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if not self._table.expire():
                continue
            names = self._table.names()
            for at in range(0, len(names), BATCH):
                self._table.sweep(names[at : at + BATCH])
                await asyncio.sleep(0)


def get_or_create_directory() -> Any:
    """Handle of the directory, started if need be. Blocks; in an event loop use a thread."""
    actor = ray.remote(KVDirectory).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
    )
    return actor.remote()


class DirectoryFeed:
    """A pool's side: collects changes and sends them at 10 Hz, or all of it to a new directory."""

    def __init__(self, node_id: str, pool: str, everything: Callable[[], list[ChunkMeta]], zone: str = "") -> None:
        self._node_id = node_id
        self._zone = zone
        self._pool = pool
        self._everything = everything
        self._changes: dict[bytes, bool] = {}
        self._task: asyncio.Task[None] | None = None
        self._directory: Any = None
        self._incarnation = ""

    def changed(self, added: Sequence[ChunkMeta], removed: Sequence[ChunkMeta]) -> None:
        for meta in removed:
            self._changes.update((name, False) for name in chunk_names(meta))
        for meta in added:
            self._changes.update((name, True) for name in chunk_names(meta))

    def start(self) -> None:
        """Starts sending in the running loop; more than once is harmless."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        sent_at = 0.0
        while True:
            now = time.monotonic()
            if self._changes or now - sent_at >= HEARTBEAT_S:
                try:
                    await self._send()
                    sent_at = now
                except Exception as error:
                    # Soft state: nothing is lost by trying again later with all there is.
                    log.info("the directory does not answer: %r", error)
                    self._directory, self._incarnation = None, ""
                    await asyncio.sleep(1.0)
            await asyncio.sleep(INTERVAL_S)

    async def _send(self) -> None:
        if self._directory is None:
            self._directory = await asyncio.to_thread(get_or_create_directory)
        changes, self._changes = self._changes, {}
        added = [name for name, here in changes.items() if here]
        removed = [name for name, here in changes.items() if not here]
        if await self._update(added, removed):
            names = [name for meta in self._everything() for name in chunk_names(meta)]
            for at in range(0, len(names), BATCH):
                await self._update(names[at : at + BATCH], [])

    async def _update(self, added: list[bytes], removed: list[bytes]) -> bool:
        reply = self._directory.update.remote(self._node_id, self._pool, added, removed, self._zone)
        incarnation, unknown = await asyncio.wait_for(_value(reply), 5.0)
        new = incarnation != self._incarnation
        self._incarnation = incarnation
        return new or unknown


async def _value(ref: Any) -> Any:
    return await ref
