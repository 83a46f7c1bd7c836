"""Which slot holds the states of which text, and which are kept for others that begin alike.

A slot is never written while somebody else may read it, so what is kept costs no copy::

    a text at token 1024    reads 5, writes 5
    its border is kept      5: kept under the key of block 31; the text reads 5 and writes 8 from here on
    another begins alike    reads 5, writes 9

States are kept at borders of blocks: where a prompt ends, where a prompt leaves what another has begun with, where a
piece of a long one ends, and the last one of what is generated. A text that has as many blocks cached as another but no
state there begins where the last kept one was.

Drafts that do not stand would have changed a state that cannot be taken back. So a pass over drafts writes to another
slot, and if one of them falls its states are left, and what stood is computed once more in the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.request import Request

# Fewer tokens than this are computed anew sooner than a step is cut for them.
WORTH_A_STEP = 64


class Stateless:
    """Of models whose layers keep nothing but keys and values: every block of a text says all of what is before it."""

    needed = False  # whether a text goes on from a state alone

    def match(self, keys: Sequence[bytes]) -> int:
        """From how many of these blocks, all cached, a text can go on."""
        return len(keys)

    def holds(self, key: bytes) -> bool:
        """Whether a text can go on behind the block of ``key``."""
        return True

    def begin(self, request: Request, key: bytes | None) -> None:
        """Lets ``request`` go on from what is kept under ``key``; None: from nothing."""

    def bring(self, request: Request) -> None:
        """What ``request`` goes on from is brought from elsewhere."""

    def slot_of(self, key: bytes) -> int:
        """Where the states behind the block or tail of ``key`` are kept; 0: nowhere."""
        return 0

    def cut(self, request: Request, start: int, count: int) -> int:
        """``count`` tokens of ``request`` from ``start`` on, or fewer, so that a step ends where states are to be
        kept."""
        return count

    def open(self, request: Request) -> None:
        """A step has tokens of ``request``."""

    def close(self, request: Request, count: int, fallen: int) -> int:
        """A step has computed ``count`` tokens of ``request``, the last ``fallen`` of which are none of its text.
        Returns how many need not be computed again."""
        return count - fallen

    def keep(self, request: Request, key: bytes | None = None) -> None:
        """Keeps the states of ``request`` for others, if they belong to the end of a block; under ``key`` anyway."""

    def release(self, request: Request, *, ended: bool = False) -> None:
        """``request`` leaves its slots."""

    def clear(self) -> None:
        """Forgets what is kept."""


class StateSlots(Stateless):
    """Slots 1 to ``count``, of which each of ``running`` texts may use two. Raises ValueError for less than that."""

    needed = True

    def __init__(self, count: int, running: int, piece: int = 0) -> None:
        """``piece``: most tokens that one step computes of a text behind a state; 0: as many as there is room for."""
        self.piece = piece
        if count < 2 * running:
            raise ValueError(f"{count} slots of states do not hold {running} texts, which may write to two each")
        self.count = count
        self._refs = [0] * (count + 1)
        self._free = list(range(count, 0, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        # Of each request the key of the last border that was kept of what it generates.
        self._latest: dict[str, bytes] = {}

    def match(self, keys: Sequence[bytes]) -> int:
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._kept), 0)

    def holds(self, key: bytes) -> bool:
        return key in self._kept

    def begin(self, request: Request, key: bytes | None) -> None:
        if key is not None:
            self._kept.move_to_end(key)
            request.state = self._kept[key]
            self._refs[request.state] += 1

    def bring(self, request: Request) -> None:
        request.state = self._take()

    def slot_of(self, key: bytes) -> int:
        return self._kept.get(key, 0)

    def cut(self, request: Request, start: int, count: int) -> int:
        if self.piece and start:
            count = min(count, self.piece)
        end = start + count
        for border in sorted((request.branch, last_border(request))):
            if start + WORTH_A_STEP <= border < end:
                return border - start
        if end < request.known and end // BLOCK_TOKENS * BLOCK_TOKENS > start:
            return end // BLOCK_TOKENS * BLOCK_TOKENS - start
        return count

    def open(self, request: Request) -> None:
        if request.draft or not request.state or self._refs[request.state] > 1:
            request.state_next = self._take()

    def close(self, request: Request, count: int, fallen: int) -> int:
        if fallen:
            self._drop(request.state_next)
        elif request.state_next:
            self._drop(request.state)
            request.state = request.state_next
        request.state_next = 0
        if fallen:
            return 0
        request.state_at = request.computed + count
        return count

    def keep(self, request: Request, key: bytes | None = None) -> None:
        if request.state_at != request.computed:
            return  # an answer has ended before its last drafts
        if key is None:
            full, rest = divmod(request.computed, BLOCK_TOKENS)
            if rest or not full:
                return
            key = request.keys[full - 1]
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if request.computed >= request.prompt_len and not request.prefill_only:
            before = self._latest.get(request.id)
            if before is not None and before in self._kept:
                self._drop(self._kept.pop(before))
            self._latest[request.id] = key
        self._kept[key] = request.state
        self._refs[request.state] += 1

    def release(self, request: Request, *, ended: bool = False) -> None:
        self._drop(request.state)
        self._drop(request.state_next)
        request.state = request.state_next = 0
        if ended:
            self._latest.pop(request.id, None)

    def clear(self) -> None:
        for slot in self._kept.values():
            self._drop(slot)
        self._kept.clear()

    def check(self) -> None:
        """Raises AssertionError where the books do not balance. For tests."""
        assert sorted(self._free) == [s for s in range(1, self.count + 1) if not self._refs[s]]
        assert all(self._refs[slot] > 0 for slot in self._kept.values())

    def _take(self) -> int:
        """A free slot, or that of what was used longest ago."""
        if not self._free:
            oldest = next(key for key, slot in self._kept.items() if self._refs[slot] == 1)
            self._drop(self._kept.pop(oldest))
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def _drop(self, slot: int) -> None:
        if slot:
            self._refs[slot] -= 1
            if not self._refs[slot]:
                self._free.append(slot)


def last_border(request: Request) -> int:
    """The last border of a block before the prompt's last token, which is always computed."""
    return (request.prompt_len - 1) // BLOCK_TOKENS * BLOCK_TOKENS
