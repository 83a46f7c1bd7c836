"""Which worker or pool probably holds which prefix: an index of chunk keys, bounded in bytes, least recently used out.

A set-associative table, the layout of a processor's cache, because ten million Python objects would take gigabytes::

    bucket = fingerprint mod buckets           16 ways a bucket
    way    = fingerprint u64 | holders 4 x u16 | stamp u32          20 bytes

A key's fingerprint is its first eight bytes (keys are sha256, so uniform). A full bucket gives up its oldest way. The
table grows bucket by bucket (linear hashing): of ``base`` buckets the first ones have been split in two, each with the
one that lies ``base`` behind it. A key's four holders are the latest ones; a holder is a worker's own cache or a
node's pool. The holder of a chunk is taken to hold the chunks before it as well, since chains are evicted from their
end. Wrong entries cost time, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WAYS = 16
HOLDERS = 4
_NEWEST = 2**32 - 1  # the largest stamp
# Buckets that each addition splits of a table that grows, and frees of holders that have gone: a millisecond at most.
_STEP = 1024
# Buckets fill unevenly: at 80 % about one key in forty finds its bucket full; of a table that has grown by half, where
# some buckets are not split yet, one in ten.
_FILL = 0.8


class LocalityIndex:
    """``capacity`` keys, about 25 bytes each. Holders are any strings; up to 65,535 of them at a time."""

    def __init__(self, capacity: int = 1_000_000) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._clock = 0
        self._names: list[str | None] = [None]  # holder 0: none
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        # Whose numbers stand for somebody. Those of holders that have gone are free once no key has them.
        self._alive = np.zeros(np.iinfo(np.uint16).max + 1, np.bool_)
        self._gone: list[int] = []
        self._sweeping: list[int] = []
        self._swept = 0  # buckets
        self._base = self._buckets = 0
        self._allocate(capacity)
        self._base = self._buckets = self._wanted

    def _allocate(self, capacity: int) -> None:
        """Room for ``capacity`` keys, with the buckets that there are; see :meth:`_split`."""
        self.capacity = capacity
        self._wanted = max(1, int(capacity / (WAYS * _FILL)) + 1)  # buckets
        self._prints = np.zeros((self._wanted, WAYS), np.uint64)
        self._holders = np.zeros((self._wanted, WAYS, HOLDERS), np.uint16)
        self._words = self._holders.view(np.uint64)[:, :, 0]  # a key's four holders as one number, the newest lowest
        self._stamps = np.zeros((self._wanted, WAYS), np.uint32)
        self._located: tuple[Sequence[bytes], NDArray[np.uint64], NDArray[np.intp]] | None = None

    @property
    def nbytes(self) -> int:
        return self._prints.nbytes + self._holders.nbytes + self._stamps.nbytes

    def __len__(self) -> int:
        return int(np.count_nonzero(self._prints))

    # -- reading -----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Holder to the number of leading ``keys`` it probably holds (at least one)."""
        if not keys or not self._numbers:
            return {}
        prints, rows = self._locate(keys)
        found = self._prints[rows] == prints[:, None]
        known = found.any(axis=1)
        # Chained keys: behind the first unknown one there is nothing to be had.
        length = len(keys) if known.all() else int(known.argmin())
        if not length:
            return {}
        rows, ways = rows[:length], found[:length].argmax(axis=1)
        self._tick()
        self._stamps[rows, ways] = self._clock
        # Four numbers of two bytes each are one of eight; most chunks of a prompt have the same holders.
        held = self._words[rows, ways].tolist()
        best: dict[int, int] = {}
        last = 0
        for at in range(length, 0, -1):
            if held[at - 1] != last:
                last = held[at - 1]
                for shift in (0, 16, 32, 48):
                    best.setdefault((last >> shift) & 0xFFFF, at)
        best.pop(0, None)
        names = self._names
        return {name: at for number, at in best.items() if (name := names[number]) is not None}

    def held(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Of each of ``keys``, by itself, whether anybody probably holds it. Nothing becomes younger by that."""
        if not keys:
            return np.zeros(0, np.bool_)
        prints = _fingerprints(keys)
        rows = self._rows(prints)
        found = self._prints[rows] == prints[:, None]
        alive = self._alive[self._holders[rows, found.argmax(axis=1)]].any(axis=1)
        known: NDArray[np.bool_] = found.any(axis=1) & alive
        return known

    # -- filling -----------------------------------------------------------------------------------------------

    def add(self, keys: Sequence[bytes], *holders: str) -> None:
        """``holders`` have, or are about to have, all of ``keys``, which need not start at token 0."""
        self._split(_STEP)
        self._sweep(_STEP)
        if not keys:
            return
        numbers = [self._number(holder) for holder in holders]
        prints, rows = self._locate(keys)
        found = self._prints[rows] == prints[:, None]
        known = found.any(axis=1)
        self._tick()
        ways = found.argmax(axis=1)
        self._stamps[rows[known], ways[known]] = self._clock  # before anything is pushed out
        new = np.flatnonzero(~known)
        if len(new):
            # All at once, unless two new keys meet in one bucket.
            apart = len(set(rows[new].tolist())) == len(new)
            for at in [new] if apart else new[:, None]:
                ways[at] = self._stamps[rows[at]].argmin(axis=1)
                self._prints[rows[at], ways[at]] = prints[at]
                self._holders[rows[at], ways[at]] = 0
                self._stamps[rows[at], ways[at]] = self._clock
        held = self._words[rows, ways].tolist()
        # Most chunks of a prompt have the same holders: few different words are worked out.
        after: dict[int, int] = {}
        for word in set(held):
            with_new = word
            for number in numbers:
                with_new = _newest(with_new, number)
            after[word] = with_new
        self._words[rows, ways] = [after[word] for word in held]

    def _tick(self) -> None:
        """Stamps have 32 bits, which a busy gateway fills within weeks. Half as large ones are in the same order."""
        if self._clock == _NEWEST:
            self._stamps -= self._stamps >> 1  # what is there stays above 0
            self._clock -= self._clock >> 1
        self._clock += 1

    def discard(self, keys: Sequence[bytes], holder: str) -> None:
        """``holder`` has dropped ``keys``."""
        number = self._numbers.get(holder)
        if not keys or number is None:
            return
        prints = _fingerprints(keys)
        rows = self._rows(prints)
        found = self._prints[rows] == prints[:, None]
        at = np.flatnonzero(found.any(axis=1))
        rows, ways = rows[at], found[at].argmax(axis=1)
        held = self._holders[rows, ways]
        self._holders[rows, ways] = np.where(held == number, 0, held)

    def grow(self, capacity: int) -> None:
        """Makes room for ``capacity`` keys, at least as many as now. The additions that follow make use of it, a part
        each: to sort millions of keys anew would keep requests waiting for seconds.
        """
        if capacity < self.capacity:
            raise ValueError(f"capacity can only grow, from {self.capacity}, not to {capacity}")
        there = slice(self._buckets)
        prints, holders, stamps = self._prints, self._holders, self._stamps
        self._allocate(capacity)
        self._prints[there] = prints[there]
        self._holders[there] = holders[there]
        self._stamps[there] = stamps[there]

    def _split(self, buckets: int) -> None:
        """Makes so many buckets more, of those that the table has room for. A key's way stays what it was."""
        while buckets > 0 and self._buckets < self._wanted:
            if self._buckets == 2 * self._base:
                self._base = self._buckets
            first = self._buckets - self._base
            count = min(buckets, self._wanted - self._buckets, self._base - first)
            old, new = slice(first, first + count), slice(self._buckets, self._buckets + count)
            moves = self._prints[old] % np.uint64(2 * self._base) >= np.uint64(self._base)
            for table in (self._prints, self._holders, self._stamps):
                table[new][moves] = table[old][moves]
                table[old][moves] = 0
            self._buckets += count
            buckets -= count
            self._located = None

    def remove_holder(self, holder: str) -> None:
        """A worker or pool is gone and everything it held. Nobody finds it from now on; that its number is taken out of
        all keys, which a large index takes a tenth of a second for, is left to the additions that follow.
        """
        number = self._numbers.pop(holder, None)
        if number is None:
            return
        self._names[number] = None
        self._alive[number] = False
        self._gone.append(number)

    def _sweep(self, buckets: int) -> None:
        """Takes holders that have gone out of so many buckets more."""
        if not self._sweeping:
            if not self._gone:
                return
            self._sweeping, self._gone, self._swept = self._gone, [], 0
        part = self._holders[self._swept : self._swept + buckets]
        part[~self._alive[part]] = 0
        self._swept += buckets
        if self._swept >= self._buckets:
            self._free += self._sweeping
            self._sweeping = []

    def _locate(self, keys: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Fingerprints and buckets; a request's keys are looked up when it is routed and added when it is sent."""
        if self._located is None or self._located[0] is not keys:
            prints = _fingerprints(keys)
            self._located = keys, prints, self._rows(prints)
        return self._located[1:]

    def _rows(self, prints: NDArray[np.uint64]) -> NDArray[np.intp]:
        """The buckets of fingerprints."""
        if self._buckets == self._base:
            return (prints % np.uint64(self._base)).astype(np.intp)
        rows = (prints % np.uint64(2 * self._base)).astype(np.intp)
        return np.where(rows < self._buckets, rows, rows - self._base)

    def _number(self, holder: str) -> int:
        number = self._numbers.get(holder)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._names[number] = holder
            else:
                number = len(self._names)
                if number >= len(self._alive):
                    raise ValueError("more than 65,535 workers and nodes: remove those that are gone")
                self._names.append(holder)
            self._numbers[holder] = number
            self._alive[number] = True
        return number


def _newest(word: int, number: int) -> int:
    """Four holders of two bytes each with ``number`` first. It displaces itself, an empty place, or the oldest."""
    held = [(word >> 16 * place) & 0xFFFF for place in range(HOLDERS)]
    at = held.index(number) if number in held else held.index(0) if 0 in held else HOLDERS - 1
    before, behind = word & ((1 << 16 * at) - 1), word >> 16 * (at + 1) << 16 * (at + 1)
    return number | before << 16 | behind


def _fingerprints(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """The first eight bytes of each key; never 0, which marks an empty way."""
    width = len(keys[0])
    if width % 8 == 0 and width:
        prints = np.frombuffer(b"".join(keys), np.uint64)
        if len(prints) == len(keys) * (width // 8):
            return np.maximum(prints[:: width // 8], np.uint64(1))
    joined = b"".join(key[:8].ljust(8, b"\0") for key in keys)
    return np.maximum(np.frombuffer(joined, np.uint64), np.uint64(1))
