"""Waiting for what another thread, process or node does or notices by itself: asked again until it is true, and given
up after a time that a busy machine does not need.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], seconds: float = 60) -> T:
    """What ``condition`` says, or what it waits for, once that is true. Raises ``TimeoutError``."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.01)


def wait_for(condition: Callable[[], T], seconds: float = 60, every: float = 0.05) -> T:
    """The same outside of an event loop."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(every)
    return found
