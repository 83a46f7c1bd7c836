"""What loops of runners share: when they look for work, what ends together is written together, and how long a try is
waited for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress


class PollLoop:
    """A loop that looks for work: after a rest, which ends early when it is woken."""

    def __init__(self) -> None:
        self._wakes = asyncio.Event()
        self._worked_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """For how long there has been nothing to do."""
        return time.monotonic() - self._worked_at

    def worked(self) -> None:
        """There is something to do."""
        self._worked_at = time.monotonic()

    def wake(self) -> None:
        """There may be something to do."""
        self.worked()
        self._wakes.set()

    async def run(self, turn: Callable[[], Awaitable[float]]) -> None:
        """Until it is cancelled. ``turn`` gives the seconds to rest before the next; 0: there may be more at once."""
        while True:
            self._wakes.clear()
            if (rest_s := await turn()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await self._wakes.wait()


class GroupLoop:
    """A loop that writes what has been told of, so much later that more can come with it."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def tell(self) -> None:
        """There is something to write."""
        self._told.set()

    async def run(self, after_s: float, write: Callable[[], Awaitable[None]]) -> None:
        """Until it is cancelled."""
        while True:
            await self._told.wait()
            await asyncio.sleep(after_s)
            self._told.clear()
            await write()


def backoff(least_s: float, tries: int, first_s: float, longest_s: float) -> float:
    """Seconds before another try, longer each time and not all at the same moment."""
    return min(max(least_s, first_s * 2 ** min(tries, 10)), longest_s) * random.uniform(0.75, 1.25)
