"""The paged cache's book-keeping: which block holds what, who uses it, and which to give away next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

BLOCK_TOKENS = 32
# Block 0 is never handed out: padding rows of a batch point at it.
TRASH_BLOCK = 0
# Keys that were forgotten are kept for whoever tells others of it, the latest so many.
EVICTED = 4096


def blocks_for(tokens: int) -> int:
    """Number of blocks that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Reference-counted blocks with a prefix cache over the free ones.

    A block that no request uses stays findable by its key until it is handed out again, least recently used first.
    ::

        free   [ oldest ... newest ]   refs == 0; those with a key are cache hits waiting to happen
        used   refs > 0                a shared prefix has one reference per request
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, num_blocks))
        # Taken out by another thread.
        self.evicted: deque[bytes] = deque(maxlen=EVICTED)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    @property
    def cached_blocks(self) -> int:
        return len(self._key_of)

    def holds(self, key: bytes) -> bool:
        return key in self._block_of

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of ``keys``. Takes no reference: call :meth:`take` next."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block of a match."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hands out ``count`` blocks, forgetting the least recently used cached ones. Check :meth:`can_allocate`
        first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                self.evicted.append(key)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def seal(self, block: int, key: bytes) -> None:
        """Names a full block, so that others find it. A key that is already held keeps its first block."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block of a request's table."""
        # Last block first, so that the head of a prefix, which more requests share, is forgotten last.
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def clear_cache(self) -> None:
        """Forgets every key. Blocks in use stay in use."""
        self.evicted.extend(self._block_of)
        self._key_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Raises AssertionError where the books do not balance. For tests."""
        assert all(self._refs[b] == 0 for b in self._free)
        assert sum(r > 0 for r in self._refs) + len(self._free) == self.num_blocks - 1
        assert {v: k for k, v in self._block_of.items()} == self._key_of
        assert TRASH_BLOCK not in self._free and self._refs[TRASH_BLOCK] == 0
