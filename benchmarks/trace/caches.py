"""Caches of prompt blocks in the simulation: the product's pool, one LRU per worker, and one without a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.index import ChunkIndex
from serve_app.kv.keys import BLOCK_TOKENS


class PoolCache:
    """The pool of one node: :class:`serve_app.kv.index.ChunkIndex`, the pool's own code, one chunk a trace block."""

    def __init__(self, blocks: int) -> None:
        self._index = ChunkIndex(blocks, clock=lambda: 0.0)

    def match(self, blocks: Sequence[bytes]) -> int:
        """Leading blocks that are held; they become the most recently used."""
        return len(self._index.match(blocks))

    def add(self, blocks: Sequence[bytes], start: int, end: int) -> list[bytes]:
        """Holds blocks ``start`` to ``end`` of a prompt; returns what went out for them."""
        evicted = []
        for at in range(start, end):
            key = blocks[at]
            # The index counts in the engine's blocks of 32 tokens; only order and size matter to it here.
            meta = ChunkMeta(key.hex(), b"", at * BLOCK_TOKENS, BLOCK_TOKENS, (key,), None, "", 1)
            victims = self._index.reserve(meta)
            if victims is None:
                continue
            self._index.commit(meta, None)
            evicted += [victim.meta.block_keys[0] for victim in victims]
        return evicted

    def __len__(self) -> int:
        return len(self._index)


class WorkerCache:
    """A worker's own blocks, least recently used out, the end of a prompt before its front."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    @property
    def held(self) -> list[bytes]:
        return list(self._held)

    def look(self, blocks: Sequence[bytes]) -> int:
        """Leading blocks that are held, without touching them."""
        held = self._held
        for at, block in enumerate(blocks):
            if block not in held:
                return at
        return len(blocks)

    def match(self, blocks: Sequence[bytes]) -> int:
        count = self.look(blocks)
        for block in reversed(blocks[:count]):
            self._held.move_to_end(block)
        return count

    def add(self, blocks: Sequence[bytes], start: int, end: int) -> list[bytes]:
        held = self._held
        for block in reversed(blocks[start:end]):
            held[block] = None
            held.move_to_end(block)
        # The front of this prompt is in use as well.
        for block in reversed(blocks[:start]):
            if block in held:
                held.move_to_end(block)
        evicted = []
        while len(held) > self._limit:
            evicted.append(held.popitem(last=False)[0])
        return evicted

    def __len__(self) -> int:
        return len(self._held)


@dataclass(slots=True)
class Caches:
    """The holders of blocks: ``by_worker`` for caches of their own, ``by_node`` for pools."""

    by_worker: list[WorkerCache] = field(default_factory=list)
    by_node: list[PoolCache] = field(default_factory=list)
