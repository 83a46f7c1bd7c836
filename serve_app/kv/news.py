"""What a pool has let go, for those who believe that it holds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from serve_app.kv.chunk import ChunkMeta

# What goes within so many seconds is told together.
TOGETHER_S = 0.25
# Keys that are kept for those who ask; whoever asks too late goes on believing, and finds out by a miss.
KEPT = 16_384


@dataclass(slots=True, frozen=True)
class PoolNews:
    """``incarnation``: a pool that was started anew holds nothing of what the one before it held. ``number``: to ask
    from next. ``keys``: of blocks that are not to be had there any more.
    """

    incarnation: str
    limit_bytes: int  # memory and files
    number: int
    keys: list[bytes]


class Departures:
    """Keys that a pool has let go, numbered in their order; the latest are kept. Used in one event loop."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=kept)  # layout, key
        self._more = asyncio.Event()
        self.number = 0  # of the next one

    def add(self, gone: Iterable[ChunkMeta], held: Callable[[bytes], bool]) -> None:
        """``held(key)``: whether another chunk has it."""
        for meta in gone:
            keys = [key for key in meta.block_keys if not held(key)]
            self._kept.extend((meta.layout, key) for key in keys)
            self.number += len(keys)
        self._more.set()
        self._more = asyncio.Event()

    async def since(self, number: int, layout: str, wait_s: float) -> tuple[int, list[bytes]]:
        """The number to ask from next, and the keys of a layout from ``number`` on, as far as they are kept; none for
        -1. Waits up to ``wait_s`` seconds for the first.
        """
        if number == self.number:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), wait_s)
                await asyncio.sleep(TOGETHER_S)
        if number < 0:
            return self.number, []
        first = self.number - len(self._kept)
        return self.number, [key for of, key in islice(self._kept, max(number - first, 0), None) if of == layout]
