"""Which node holds which chunk: soft state, fed by the pools in batches. Wrong or stale only ever means
a miss.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray

from serve_app import logs
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.directory_table import PARTS, DirectoryTable, chunk_names
from serve_app.ray_private.node_actors import HEAD

log = logging.getLogger(__name__)

NAMESPACE = "serve_app"
NAME = "kvdirectory"
THREADS = 4
# The least time between two messages of a pool, the most, and how many messages there may be a second from all pools.
INTERVAL_S = 0.1
HEARTBEAT_S = 2.0
MESSAGES_S = 250.0
# How often it is looked which nodes have gone, and how long a message may wait for what they leave to be removed.
EXPIRE_S = 1.0
SWEEP_S = 0.002
# Names per message when a whole pool is sent again. Look-ups wait for as long as the directory takes for one message.
BATCH = 2_000


class KVDirectory:
    """The actor around the table. One for the cluster; restarts empty and is filled again by the pools.

    Its methods run on a few threads, one at a time: a coroutine's call costs Ray twice as much, and calls are what the
    directory of a large cluster spends its time on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        logs.set_up("kv directory")
        self._clock = clock
        self._table = DirectoryTable(clock)
        self._incarnation = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._expired_at = clock()
        # What is still to be done for nodes that have gone.
        self._stale: set[int] = set()
        self._unswept: list[int] = []

    def update(
        self, node_id: str, pool: str, added: Sequence[bytes], removed: Sequence[bytes], zone: str = ""
    ) -> tuple[str, bool, float]:
        """(incarnation of the directory, whether it wants everything again, seconds until the next message)."""
        with self._lock:
            self._tidy()
            unknown = self._table.update(node_id, pool, added, removed, zone)
            return self._incarnation, unknown, pause_s(self._table.alive)

    def best(
        self,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes] = (),
        start_block: int = 0,
        exclude: str = "",
        zone: str = "",
    ) -> list[tuple[str, int]]:
        """See :meth:`DirectoryTable.best`."""
        with self._lock:
            return self._table.best(keys, tail_keys, start_block, exclude, zone)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"names": len(self._table), "nodes": self._table.nodes, "sets": self._table.sets}

    def _tidy(self) -> None:
        """Forgets nodes that have gone, a little with each message: pools send some for as long as there are any."""
        now = self._clock()
        if not self._unswept and now - self._expired_at >= EXPIRE_S:
            self._expired_at = now
            if self._table.expire():
                self._stale, self._unswept = self._table.stale(), list(range(PARTS))
        while self._unswept:
            self._table.sweep(self._unswept.pop(), self._stale)
            if self._clock() - now >= SWEEP_S:
                break
        else:
            self._stale = set()


def pause_s(nodes: int) -> float:
    """Seconds between two messages of a pool: all pools together send no more than :data:`MESSAGES_S` a second."""
    return min(max(INTERVAL_S, nodes / MESSAGES_S), HEARTBEAT_S)


def get_or_create_directory() -> Any:
    """Handle of the directory, started if need be. Blocks; in an event loop use a thread."""
    actor = ray.remote(KVDirectory).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=THREADS,
        # On the head, which stays: a node with an actor on it is never given back, and would never have drained.
        resources={HEAD: 0.001},
    )
    return actor.remote()


class DirectoryFeed:
    """A pool's side: collects changes and sends them as often as the directory wants them, up to ten times a second, or
    all of it to a new directory.
    """

    def __init__(self, node_id: str, pool: str, everything: Callable[[], list[ChunkMeta]], zone: str = "") -> None:
        self._node_id = node_id
        self._zone = zone
        self._pool = pool
        self._everything = everything
        self._changes: dict[bytes, bool] = {}
        self._task: asyncio.Task[None] | None = None
        self._directory: Any = None
        self._incarnation = ""
        self._pause_s = INTERVAL_S

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
            await asyncio.sleep(self._pause_s)

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
        # One of an older release names no pause.
        incarnation, unknown, *pause = await asyncio.wait_for(_value(reply), 5.0)
        self._pause_s = pause[0] if pause else INTERVAL_S
        new = incarnation != self._incarnation
        self._incarnation = incarnation
        return new or unknown


async def _value(ref: Any) -> Any:
    return await ref
