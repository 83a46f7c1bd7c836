"""What workers say of K/V that are gone, taken out of the locality index, and how large that has to be.

Requests put entries in when they are sent. What is said here ends those that have become wrong: a cache or pool has let
something go, a pool was started anew, a node is gone, or a model's weights were replaced.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from serve_app.routing.locality import LocalityIndex
from serve_app.routing.types import WorkerLoad

_POOL = "node:"
_KEY_BYTES = 8
# Nobody on a node has reported for so long: it is gone, and its pool with it.
NODE_GONE_S = 60.0
# Keys of the index: room for chunks that several prompts have in part, and the most, about 250 MB.
ROOM = 1.25
MOST_KEYS = 10_000_000


def pool_holder(node: str) -> str:
    """A node's pool as a holder in the locality index."""
    return _POOL + node


def node_of(holder: str) -> str | None:
    """The node whose pool a holder is; None for a worker."""
    return holder[len(_POOL) :] if holder.startswith(_POOL) else None


@dataclass(slots=True)
class _Pool:
    """``before``: the incarnation before; workers hear of a new one at different times."""

    incarnation: str
    tokens: int
    heard_at: float
    before: str = ""


class Beliefs:
    """``take`` every report, and ``forget`` workers that are gone. ``chunk_tokens`` is what a key stands for."""

    def __init__(self, locality: LocalityIndex, chunk_tokens: int) -> None:
        self._locality = locality
        self._chunk_tokens = chunk_tokens
        self._pools: dict[str, _Pool] = {}
        self._workers: dict[str, tuple[int, bytes]] = {}  # tokens of the own cache, weights
        self._looked_at = -math.inf
        # What most workers' keys start from.
        self.weights = b""

    def take(self, load: WorkerLoad) -> None:
        now = load.reported_at
        self._take_pool(load, now)
        worker = (load.kv_tokens_total, load.weights)
        if self._workers.get(load.worker) != worker:
            self._workers[load.worker] = worker
            self._count_weights()
            self._resize()
        if load.evicted:
            self._locality.discard(_split(load.evicted), load.worker)
        if load.pool_evicted and load.pool == self._pools[load.node].incarnation:
            self._locality.discard(_split(load.pool_evicted), pool_holder(load.node))
        if now - self._looked_at > NODE_GONE_S / 10:
            self._looked_at = now
            self._look_for_nodes(now)

    def _take_pool(self, load: WorkerLoad, now: float) -> None:
        pool = self._pools.get(load.node)
        if pool is None:
            pool = self._pools[load.node] = _Pool(load.pool, load.pool_tokens, now)
            self._resize()
        pool.heard_at = now
        if load.pool in ("", pool.incarnation, pool.before):
            return
        if pool.incarnation:
            self._locality.remove_holder(pool_holder(load.node))
        pool.before, pool.incarnation, pool.tokens = pool.incarnation, load.pool, load.pool_tokens
        self._resize()

    def forget(self, worker: str) -> None:
        """A worker is gone, with its own cache."""
        self._locality.remove_holder(worker)
        if self._workers.pop(worker, None) is not None:
            self._count_weights()

    def _look_for_nodes(self, now: float) -> None:
        for node in [name for name, pool in self._pools.items() if now - pool.heard_at > NODE_GONE_S]:
            del self._pools[node]
            self._locality.remove_holder(pool_holder(node))

    def _count_weights(self) -> None:
        # While an upgrade runs there are two; those of the workers that will stay become more.
        counts = Counter(weights for _, weights in self._workers.values() if weights)
        if counts:
            self.weights = counts.most_common(1)[0][0]

    def _resize(self) -> None:
        """As many keys as caches and pools can hold, unless the index holds as many already."""
        tokens = sum(tokens for tokens, _ in self._workers.values()) + sum(p.tokens for p in self._pools.values())
        wanted = min(math.ceil(tokens / self._chunk_tokens * ROOM), MOST_KEYS)
        if wanted > self._locality.capacity:
            # Not for every worker that comes.
            self._locality.grow(min(max(wanted, 2 * self._locality.capacity), MOST_KEYS))


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]
