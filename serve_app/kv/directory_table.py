"""The directory's data structure: names of chunks, and the nodes that hold each. No Ray here.

Ten million names are ten million entries of a dict: a name costs its bytes and a place there, 80 to 100 bytes in all::

    parts[first byte of the name]: name -> 5       256 dicts: each is grown, and swept, in some milliseconds
    sets: 5 -> Holders((3, 17), names)             one for all names that the same nodes hold

Values are numbers and not the sets themselves, so that Python's garbage collector has nothing to look for in the parts.
A node that has gone is no longer among the live ones, whatever sets have it; a sweep of the parts removes these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from serve_app.costs.zones import distance
from serve_app.kv.chunk import ChunkMeta
from serve_app.kv.keys import BLOCK_TOKENS, CHUNK_TOKENS

# 120 bits of a sha256: a collision is a miss at the pool. Python's objects come in steps of 16 bytes: one byte more
# would make each name 64 bytes instead of 48.
NAME_BYTES = 15
# Of a name in messages: pools and directories of two releases meet.
SENT_BYTES = 16
PARTS = 256
NODE_TIMEOUT_S = 10.0
# What blocks are worth that come from the same zone, from the same region and from elsewhere.
WORTH = (1.0, 0.8, 0.5)
_CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


def chunk_names(meta: ChunkMeta) -> list[bytes]:
    """A chunk is entered under its last full block and its tail: enough to find where it ends."""
    return [key[:SENT_BYTES] for key in (*meta.block_keys[-1:], *((meta.tail_key,) if meta.tail_key else ()))]


@dataclass(slots=True, eq=False)
class Holders:
    """Numbers of the nodes that hold the same chunks, ascending, and how many names there are of these chunks: a set
    that no name is left of is forgotten.
    """

    nodes: tuple[int, ...]
    names: int = 0


class DirectoryTable:
    """Chunk name to nodes.

    A node is known by its pool's incarnation; what a dead one entered is ignored at once and swept later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self._sets: dict[int, Holders] = {}
        self._set_of: dict[tuple[int, ...], int] = {}
        self._next_set = 0
        self._number: dict[tuple[str, str], int] = {}
        self._live: dict[int, tuple[str, float]] = {}
        self._next = 0
        self._zones: dict[str, str] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def update(self, node_id: str, pool: str, added: Iterable[bytes], removed: Iterable[bytes], zone: str = "") -> bool:
        """Applies changes of a pool incarnation; True if it was unknown, i.e. should send all it holds."""
        self._zones[node_id] = zone
        found = self._number.get((node_id, pool))
        unknown = found is None or found not in self._live
        if found is None or unknown:
            for other in [n for n, (name, _) in self._live.items() if name == node_id]:
                del self._live[other]
            found = self._number[node_id, pool] = self._next
            self._next += 1
        number, live = found, self._live
        live[number] = (node_id, self._clock() + NODE_TIMEOUT_S)
        self._change(
            (name[:NAME_BYTES] for name in removed), lambda nodes: tuple(n for n in nodes if n != number and n in live)
        )
        self._change(
            (name[:NAME_BYTES] for name in added),
            lambda nodes: tuple(sorted({number, *(n for n in nodes if n in live)})),
        )
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
        ends: dict[int, int] = {}
        # No chunk goes beyond a multiple of 256 tokens, so a node that has more than that has a chunk which ends there.
        borders = range((start_block // _CHUNK_BLOCKS + 1) * _CHUNK_BLOCKS, len(keys) + 1, _CHUNK_BLOCKS)
        for end in borders:
            if not self._extend(ends, keys[end - 1], end, start_block):
                break
        # Behind the last border that a node reaches, its last chunk may end anywhere.
        for reached in sorted({start_block, *ends.values()}):
            border = (reached // _CHUNK_BLOCKS + 1) * _CHUNK_BLOCKS
            for end in range(reached + 1, min(border, len(keys) + 1)):
                self._extend(ends, keys[end - 1], end, start_block)
        for key in tail_keys:
            self._extend(ends, key, len(keys) + 1, start_block)

        def worth(found: tuple[str, int]) -> float:
            node, end = found
            return (end - start_block) * WORTH[distance(zone, self._zones.get(node, ""))]

        now, none = self._clock(), ("", 0.0)
        found = [(*self._live.get(number, none), end) for number, end in ends.items()]
        live = [(node, end) for node, until, end in found if until > now and node != exclude]
        return sorted(live, key=worth, reverse=True)

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

    def stale(self) -> set[int]:
        """The sets with a dead node, for :meth:`sweep`. No new one gets such a node: what is dead stays so."""
        live = self._live
        return {at for at, holders in self._sets.items() if any(n not in live for n in holders.nodes)}

    def sweep(self, part: int, stale: AbstractSet[int]) -> None:
        """Removes dead nodes from the names of one of the :data:`PARTS`."""
        live = self._live
        names = [name for name, held in self._parts[part].items() if held in stale]
        self._change(names, lambda nodes: tuple(n for n in nodes if n in live))

    @property
    def nodes(self) -> list[str]:
        return sorted(name for name, _ in self._live.values())

    @property
    def alive(self) -> int:
        """How many nodes there are."""
        return len(self._live)

    @property
    def sets(self) -> int:
        """How many different sets of holders there are."""
        return len(self._sets)

    def _extend(self, ends: dict[int, int], key: bytes, end: int, start: int) -> bool:
        """Notes the nodes with a chunk that ends at block ``end``, which ``key`` names, if they reach to where it may
        begin; whether there are any. ``ends``: how far nodes reach, those that are not there to ``start``.
        """
        held = self._parts[key[0]].get(key[:NAME_BYTES])
        if held is None:
            return False
        found, begin = False, (end - 1) // _CHUNK_BLOCKS * _CHUNK_BLOCKS
        for number in self._sets[held].nodes:
            if begin <= ends.get(number, start) < end:
                ends[number] = end
                found = True
        return found

    def _change(self, names: Iterable[bytes], after: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        """Gives each name the nodes ``after`` makes of those that it has. Twice must be like once: few different sets
        are worked out, however many names there are.
        """
        sets = self._sets
        known: dict[int | None, int | None] = {}
        for name in names:
            part = self._parts[name[0]]
            old = part.get(name)
            if old in known:
                new = known[old]
            else:
                new = known[old] = self._set(after(() if old is None else sets[old].nodes))
            if new == old:
                continue
            if new is None:
                del part[name]
            else:
                part[name] = new
                sets[new].names += 1
            if old is not None:
                holders = sets[old]
                holders.names -= 1
                if not holders.names:
                    del sets[old], self._set_of[holders.nodes]

    def _set(self, nodes: tuple[int, ...]) -> int | None:
        """The number of the set of ``nodes``; None for no nodes. Whoever asks has a name for it."""
        if not nodes:
            return None
        found = self._set_of.get(nodes)
        if found is None:
            found = self._set_of[nodes] = self._next_set
            self._next_set += 1
            self._sets[found] = Holders(nodes)
        return found
