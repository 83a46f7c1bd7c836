"""Has runners of batches at work while there is something to do for them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from serve_app.state.state import State

log = logging.getLogger("ray.serve")

# How often the store is asked whether any batch is unfinished; after a restart of everything nobody else would see it.
LOOK_S = 2.0
# Before runners are called again that could not be reached.
AGAIN_S = 0.5
# A gateway that has called a first runner works itself for so long: by then the runner is up.
BEGIN_S = 5.0
# What is under way then may end within so many seconds.
DRAIN_S = 5.0
# Serve keeps a runner for longer than this behind its last call.
WARM_S = 25.0


class Beginner(Protocol):
    """What works in this process, and leaves what it has not done to others when it is cancelled. ``drain``: it begins
    nothing more, and returns when nothing is under way.
    """

    async def run(self) -> None: ...

    async def drain(self) -> None: ...

    def wake(self) -> None: ...

    def release(self) -> None: ...


class Runners:
    """``work`` calls a runner, starts one where there is none, and returns when nothing has been left to do for a
    while; ``nudge`` tells one that works to look now. None: there are no runners. ``here`` makes what works in this
    process while a first runner starts; None: nothing does.
    """

    work: Callable[[], Awaitable[Any]] | None = None
    nudge: Callable[[], Awaitable[Any]] | None = None
    here: Callable[[], Beginner] | None = None

    def __init__(self, state: State) -> None:
        self._state = state
        self._wakes = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None
        self._nudged: asyncio.Task[bool] | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._beginner: Beginner | None = None
        # When the last call of a runner ended well.
        self._worked_at = -math.inf

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    def close(self) -> None:
        for task in (self._task, self._working, self._nudged, self._beginning):
            if task is not None:
                task.cancel()
        if self._beginner is not None:
            self._beginner.release()

    def wake(self) -> None:
        """There may be something to do; runners that work already hear of it at once."""
        self._wakes.set()
        if self._beginner is not None:
            self._beginner.wake()

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
                self._working = asyncio.ensure_future(self._work())
                cold = time.monotonic() - self._worked_at > WARM_S
                if woken and cold and self.here is not None and self._beginner is None:
                    self._beginning = asyncio.ensure_future(self._begin(self.here()))

    async def _begin(self, beginner: Beginner) -> None:
        """Has the first requests answered before a runner is up."""
        self._beginner = beginner
        try:
            beginner.wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(BEGIN_S + DRAIN_S), asyncio.TaskGroup() as tasks:
                    working = tasks.create_task(beginner.run())
                    await asyncio.wait([working], timeout=BEGIN_S)
                    if not working.done():
                        await beginner.drain()
                        working.cancel()
        except Exception as error:
            log.warning("batches could not be begun in the gateway (%s)", type(error).__name__)
        finally:
            self._beginner = None

    async def _busy(self) -> bool:
        state = self._state
        # The store may be away; runners could do nothing then.
        with suppress(Exception):
            return await state.look(lambda: state.batches.busy() or bool(state.queues.waiting(time.time())))
        return False

    async def _work(self) -> None:
        if await self._call(self.work):
            self._worked_at = time.monotonic()

    async def _call(self, call: Callable[[], Awaitable[Any]] | None) -> bool:
        """Whether it ended well."""
        if call is None:
            return False
        try:
            await call()
            return True
        except Exception as error:
            log.warning("a runner of batches was lost (%s); another goes on", type(error).__name__)
            await asyncio.sleep(AGAIN_S)
            return False
