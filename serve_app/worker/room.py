"""Bytes that requests hold beside their K/V, in the order in which they come: who finds no room waits for others."""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """Of ``size`` bytes, for callers on one event loop. One who wants more than there is at all gets it once nobody has
    any.
    """

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, count: int) -> asyncio.Future[None]:
        """Done once the caller has ``count`` bytes; cancelled before, it has none."""
        found = asyncio.get_running_loop().create_future()
        self._waiting.append((count, found))
        self.give(0)
        return found

    def give(self, count: int) -> None:
        """Takes back what somebody had."""
        self.used -= count
        while self._waiting:
            wanted, first = self._waiting[0]
            if not first.cancelled():
                if self.used and self.used + wanted > self.size:
                    return
                self.used += wanted
                first.set_result(None)
            self._waiting.popleft()
