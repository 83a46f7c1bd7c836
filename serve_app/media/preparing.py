"""Inputs of strangers are prepared a few at a time, accounts in turns, and what takes long makes room for the others.

::

    inputs ──> quick: 2 places ──> prepared
                  │ still not done after a second
                  └─> long: 2 places, one of each account

Whoever sends files that take long waits behind the own ones. What finds no place among the long ones while others wait
is stopped, and begins anew when there is one: so nothing holds a quick place for much longer than a second.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from serve_app.media.decoder import PROCESSES, Interrupted, interrupted

QUICK = 2
LONG = PROCESSES - QUICK
QUICK_S = 1.0
# Bytes of inputs that wait for their turn. Beyond it an account still gets its share, divided by those that wait.
MOST_BYTES = 256 << 20

_Made = TypeVar("_Made")


class Full(Exception):
    """Too much of this account waits already."""


class Lane:
    """``places``, of which each account has up to ``each`` at a time. Accounts wait in turns."""

    def __init__(self, places: int, each: int) -> None:
        self._free = places
        self._each = each
        self._held: Counter[bytes] = Counter()
        # By account, the one whose turn is next in front; none is empty.
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    def take(self, account: bytes) -> bool:
        """A place, if there is one now."""
        if not self._free or self._held[account] >= self._each:
            return False
        self._free -= 1
        self._held[account] += 1
        return True

    async def enter(self, account: bytes) -> None:
        """Waits for a place; :meth:`leave` is due."""
        if account not in self._waiting and self.take(account):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget_gone(account)
            else:
                self.leave(account)
            raise

    def leave(self, account: bytes) -> None:
        self._free += 1
        self._held[account] -= 1
        if not self._held[account]:
            del self._held[account]
        self._call_next()

    def others_wait(self, account: bytes) -> bool:
        return any(waiting != account for waiting in self._waiting)

    def _call_next(self) -> None:
        for account in list(self._waiting):
            self._forget_gone(account)
            if account in self._waiting and self.take(account):
                turns = self._waiting.pop(account)
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[account] = turns

    def _forget_gone(self, account: bytes) -> None:
        left = deque(turn for turn in self._waiting.get(account, ()) if not turn.done())
        if left:
            self._waiting[account] = left
        else:
            self._waiting.pop(account, None)


class Preparing:
    """Of one event loop. ``quick_s``: after so long an input counts as a long one."""

    def __init__(self, quick_s: float = QUICK_S, most_bytes: int = MOST_BYTES) -> None:
        self._quick = Lane(QUICK, QUICK)
        self._long = Lane(LONG, 1)
        self._quick_s = quick_s
        self._most = most_bytes
        self._bytes: Counter[bytes] = Counter()
        self._threads = ThreadPoolExecutor(QUICK + LONG, thread_name_prefix="prepare")

    def close(self) -> None:
        """Nothing new begins; what is being decoded ends with its decoder."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, account: bytes, size: int, prepare: Callable[[], _Made]) -> _Made:
        """``prepare()`` in a thread, at its account's turn; ``size``: bytes of its input. It may be called twice. Where
        nobody waits for it any more it is stopped, if it decodes a file. Raises :class:`Full` and what it raises.
        """
        with_it = self._bytes.total() + size
        if with_it > self._most and self._bytes[account] + size > self._most / len({*self._bytes, account}):
            raise Full
        self._bytes[account] += size
        try:
            lane = self._quick
            await lane.enter(account)
            try:
                return await self._begun(account, prepare, lane)
            except Interrupted:
                pass  # only its place has been needed
            await self._long.enter(account)
            return await self._begun(account, prepare, self._long)
        finally:
            self._bytes[account] -= size
            if not self._bytes[account]:
                del self._bytes[account]

    async def _begun(self, account: bytes, prepare: Callable[[], _Made], lane: Lane) -> _Made:
        """Runs what has a place in ``lane``, which is free again when the thread is."""
        stop = threading.Event()
        context = contextvars.copy_context()
        context.run(interrupted.set, stop)
        work = asyncio.get_running_loop().run_in_executor(self._threads, context.run, prepare)
        try:
            while True:
                await asyncio.wait({work}, timeout=self._quick_s if lane is self._quick else None)
                if work.done():
                    return work.result()
                if self._long.take(account):
                    lane.leave(account)
                    lane = self._long
                elif self._quick.others_wait(account):
                    stop.set()
        finally:
            if work.done():
                lane.leave(account)
            else:
                # A thread is not over when nobody waits for it any more.
                stop.set()
                work.add_done_callback(partial(_over, lane, account))


def _over(lane: Lane, account: bytes, work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()  # is told to nobody
    lane.leave(account)
