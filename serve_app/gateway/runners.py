"""Has runners of batches at work while there is something to do for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from serve_app.state.state import State

log = logging.getLogger("ray.serve")

# How often the store is asked whether any batch is unfinished; after a restart of everything nobody else would see it.
LOOK_S = 2.0
# Before runners are called again that could not be reached.
AGAIN_S = 0.5


class Runners:
    """``work`` calls a runner, starts one where there is none, and returns when nothing has been left to do for a
    while; ``nudge`` tells one that works to look now. None: there are no runners.
    """

    work: Callable[[], Awaitable[Any]] | None = None
    nudge: Callable[[], Awaitable[Any]] | None = None

    def __init__(self, state: State) -> None:
        self._state = state
        self._wakes = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None
        self._nudged: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    def close(self) -> None:
        for task in (self._task, self._working, self._nudged):
            if task is not None:
                task.cancel()

    def wake(self) -> None:
        """There may be something to do; runners that work already hear of it at once."""
        self._wakes.set()

    async def _watch(self) -> None:
        while True:
            woken = False
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    woken = await self._wakes.wait()
            self._wakes.clear()
            working = self._working is not None and not self._working.done()
            if working and woken:
                self._nudged = asyncio.ensure_future(self._call(self.nudge))
            elif woken or (not working and await self._busy()):
                self._working = asyncio.ensure_future(self._call(self.work))

    async def _busy(self) -> bool:
        state = self._state
        # The store may be away; runners could do nothing then.
        with suppress(Exception):
            return await state.look(lambda: state.batches.busy() or bool(state.queues.waiting(time.time())))
        return False

    async def _call(self, call: Callable[[], Awaitable[Any]] | None) -> None:
        if call is None:
            return
        try:
            await call()
        except Exception as error:
            log.warning("a runner of batches was lost (%s); another goes on", type(error).__name__)
            await asyncio.sleep(AGAIN_S)
