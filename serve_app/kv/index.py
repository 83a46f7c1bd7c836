"""What one node holds: keys to chunks, never more bytes than allowed. No Ray here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.kv.chunk import ChunkMeta, Piece
from serve_app.kv.eviction import ACTIVE_S, Entry, Tenant, shares, victims
from serve_app.kv.keys import BLOCK_TOKENS

# Of the bytes allowed, shared out equally among the active tenants; the rest is for whoever comes.
GUARANTEED = 0.5


@dataclass(slots=True)
class IndexStats:
    """Counts since the start, in chunks; ``bytes`` and ``reserved`` (on their way) are present sizes."""

    added: int = 0
    duplicates: int = 0
    evicted: int = 0
    refused: int = 0
    removed: int = 0
    bytes: int = 0
    reserved: int = 0
    chunks: int = 0


@dataclass(slots=True, frozen=True)
class Evicted:
    """``replaced``: a longer chunk with the same beginning is held."""

    meta: ChunkMeta
    value: Any
    replaced: bool = False


@dataclass(slots=True, eq=False)
class Pins:
    """What one reader pinned. Entries, not ids: a chunk may be removed and stored anew meanwhile."""

    entries: list[Entry]


class ChunkIndex:
    """``value`` is whatever keeps a payload alive (in the pool: its ObjectRef); dropping the entry drops it.

    Space is reserved before a payload is fetched, so bytes on their way count as well. A chunk all of
    whose keys other chunks hold adds nothing and is refused; two chunks may share some keys, and the
    longer match is used.

    :mod:`serve_app.kv.eviction` says what goes for a newcomer; a tenant's share is ``limit_bytes * guaranteed / active
    tenants``.
    """

    def __init__(
        self, limit_bytes: int, guaranteed: float = GUARANTEED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes must be positive, got {limit_bytes}")
        if not 0.0 <= guaranteed <= 1.0:
            raise ValueError(f"guaranteed must be within 0..1, got {guaranteed}")
        self.limit_bytes = limit_bytes
        self.stats = IndexStats()
        self._guaranteed = guaranteed
        self._clock = clock
        self._uses = 0
        self._entries: dict[str, Entry] = {}
        self._tenants: dict[bytes, Tenant] = {}
        self._holders: dict[bytes, tuple[Entry, ...]] = {}
        self._reserved: dict[str, int] = {}

    def __contains__(self, chunk_id: str) -> bool:
        return chunk_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def chunk_ids(self) -> list[str]:
        """Least recently used first."""
        return [entry.meta.chunk_id for entry in sorted(self._entries.values(), key=lambda entry: entry.used)]

    @property
    def active_tenants(self) -> int:
        return len(shares(self._tenants.values(), 0.0, self._clock()))

    def meta(self, chunk_id: str) -> ChunkMeta | None:
        entry = self._entries.get(chunk_id)
        return entry.meta if entry else None

    def value(self, chunk_id: str) -> Any:
        """Raises KeyError for a chunk that is not held."""
        return self._entries[chunk_id].value

    def replaced(self, chunk_id: str) -> bool:
        """Whether a longer chunk has taken a held chunk's place, and nobody has asked for it since."""
        return self._entries[chunk_id].used == 0

    def holds_all(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._holders for key in keys)

    # -- filling ---------------------------------------------------------------------------------------------

    def reserve(self, meta: ChunkMeta) -> list[Evicted] | None:
        """Makes room for a chunk that is about to be fetched and returns what was evicted for it, with its value.

        None: do not fetch it (already held or on its way, or there is no room beside what is pinned).
        """
        if meta.chunk_id in self._reserved or self.holds_all(meta.keys):
            self.stats.duplicates += 1
            self._touch(meta.chunk_id)
            return None
        evicted = self._make_room(meta)
        if evicted is None:
            self.stats.refused += 1
            return None
        self._reserved[meta.chunk_id] = meta.nbytes
        self.stats.reserved += meta.nbytes
        return evicted

    def cancel(self, meta: ChunkMeta) -> None:
        """Gives a reservation back."""
        self.stats.reserved -= self._reserved.pop(meta.chunk_id, 0)

    def commit(self, meta: ChunkMeta, value: Any) -> bool:
        """Turns a reservation into a held chunk; False if there is no such reservation."""
        if meta.chunk_id not in self._reserved:
            return False
        self.cancel(meta)
        self._demote_replaced(meta)
        entry = Entry(meta, value, self._tenant(meta.tenant))
        self._entries[meta.chunk_id] = entry
        entry.tenant.bytes += meta.nbytes
        self._use(entry)
        for key in meta.keys:
            self._holders[key] = (*self._holders.get(key, ()), entry)
        self.stats.added += 1
        self.stats.bytes += meta.nbytes
        self.stats.chunks += 1
        return True

    def remove(self, chunk_id: str) -> ChunkMeta | None:
        """Forgets a chunk at once, pinned or not: for payloads that turned out lost or wrong."""
        entry = self._entries.get(chunk_id)
        if entry is None:
            return None
        self._drop(entry)
        self.stats.removed += 1
        return entry.meta

    # -- reading ---------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], tail_keys: Sequence[bytes] = (), start_block: int = 0) -> list[Piece]:
        """The longest gapless cover of a prompt from block ``start_block`` on, in order.

        ``keys`` are those of all full blocks of the prompt from token 0 on. ``tail_keys`` name
        candidates for the partial block behind the last of them, best first, and count only if the full
        blocks are covered. Everything used becomes most recent, the front of the prompt last, so that
        chains are evicted from their end.
        """
        pieces: list[Piece] = []
        at = start_block
        while at < len(keys):
            best, run = None, 0
            for entry in self._holders.get(keys[at], ()):
                length = _run(entry.meta, keys, at)
                if length > run:
                    best, run = entry, length
            if best is None:
                break
            pieces.append(_piece(best.meta, at, run, run * BLOCK_TOKENS))
            at += run
        if at == len(keys):
            self._add_tail(pieces, tail_keys, at)
        for piece in reversed(pieces):
            self._touch(piece.chunk_id)
        return pieces

    def _add_tail(self, pieces: list[Piece], tail_keys: Sequence[bytes], at: int) -> None:
        for key in tail_keys:
            holders = self._holders.get(key)
            if not holders:
                continue
            last = pieces[-1] if pieces else None
            entry = next((e for e in holders if last and e.meta.chunk_id == last.chunk_id), holders[0])
            tokens = entry.meta.end_token - at * BLOCK_TOKENS
            if last and last.chunk_id == entry.meta.chunk_id:
                pieces[-1] = _piece(
                    entry.meta, last.start_token // BLOCK_TOKENS, last.n_blocks + 1, last.n_tokens + tokens
                )
            else:
                pieces.append(_piece(entry.meta, at, 1, tokens))
            return

    def pin(self, chunk_ids: Iterable[str]) -> Pins:
        """Keeps chunks from being evicted until :meth:`unpin`; raises KeyError for one that is not held."""
        entries = [self._entries[chunk_id] for chunk_id in chunk_ids]
        for entry in entries:
            entry.pins += 1
        return Pins(entries)

    def unpin(self, pins: Pins) -> None:
        """Undoes one :meth:`pin`; a second time it does nothing."""
        for entry in pins.entries:
            entry.pins -= 1
        pins.entries = []

    # -- inside ----------------------------------------------------------------------------------------------

    def _tenant(self, name: bytes) -> Tenant:
        return self._tenants.setdefault(name, Tenant(OrderedDict()))

    def _touch(self, chunk_id: str) -> None:
        if (entry := self._entries.get(chunk_id)) is not None:
            self._use(entry)

    def _use(self, entry: Entry) -> None:
        self._uses += 1
        entry.used = self._uses
        entry.tenant.seen = self._clock()
        entry.tenant.entries[entry.meta.chunk_id] = entry
        entry.tenant.entries.move_to_end(entry.meta.chunk_id)

    def _demote_replaced(self, meta: ChunkMeta) -> None:
        """What begins where ``meta`` does and is shorter serves at most its tail now: it goes first."""
        for entry in self._holders.get(meta.block_keys[0], ()) if meta.block_keys else ():
            shorter = entry.meta.start_token == meta.start_token and len(entry.meta.block_keys) < len(meta.block_keys)
            if shorter and entry.meta.block_keys[-1] in meta.block_keys:
                entry.used = 0
                entry.tenant.entries.move_to_end(entry.meta.chunk_id, last=False)

    def _make_room(self, meta: ChunkMeta) -> list[Evicted] | None:
        mine, now = self._tenant(meta.tenant), self._clock()
        mine.seen = now
        excess = self.stats.bytes + self.stats.reserved + meta.nbytes - self.limit_bytes
        if excess <= 0:
            return []
        for name in [n for n, t in self._tenants.items() if not t.entries and now - t.seen > ACTIVE_S]:
            del self._tenants[name]
        tenants = self._tenants.values()
        gone = victims(tenants, mine, excess, shares(tenants, self.limit_bytes * self._guaranteed, now))
        if gone is None:
            return None
        for entry in gone:
            self._drop(entry)
            self.stats.evicted += 1
        return [Evicted(entry.meta, entry.value, entry.used == 0) for entry in gone]

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.meta.chunk_id]
        del entry.tenant.entries[entry.meta.chunk_id]
        entry.tenant.bytes -= entry.meta.nbytes
        for key in entry.meta.keys:
            rest = tuple(other for other in self._holders[key] if other is not entry)
            if rest:
                self._holders[key] = rest
            else:
                del self._holders[key]
        self.stats.bytes -= entry.meta.nbytes
        self.stats.chunks -= 1


def _run(meta: ChunkMeta, keys: Sequence[bytes], at: int) -> int:
    """How many of the chunk's blocks, from prompt block ``at`` on, the prompt shares."""
    first = at - meta.start_block
    if not 0 <= first < len(meta.block_keys) or meta.block_keys[first] != keys[at]:
        return 0
    # Keys are chained: if the last common block agrees, so do those between.
    count = min(len(meta.block_keys) - first, len(keys) - at)
    while meta.block_keys[first + count - 1] != keys[at + count - 1]:
        count -= 1
    return count


def _piece(meta: ChunkMeta, at: int, blocks: int, tokens: int) -> Piece:
    return Piece(
        meta.chunk_id, meta.start_token, at - meta.start_block, blocks, tokens, meta.layout, meta.n_blocks, meta.nbytes
    )
