"""Work that holds the interpreter for long: one piece at a time, whoever sends how many, and accounts in turns.

Each thread that computes in Python takes time from the event loop, on which everybody's tokens travel. So large bodies
are looked through by one thread at most, and an account that sends many waits behind itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class InTurns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._busy = False
        # By account, the one whose turn is next in front; none is empty.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, account: str, function: Callable[..., _Found], *args: object) -> _Found:
        """``function(*args)`` in a thread, at its account's turn."""
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(account, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._busy = True
        work = asyncio.ensure_future(asyncio.to_thread(function, *args))
        # A thread is not over when nobody waits for it any more.
        work.add_done_callback(self._done)
        return await asyncio.shield(work)

    def _done(self, work: asyncio.Future[_Found]) -> None:
        if not work.cancelled():
            work.exception()  # is told to whoever waits, if anybody still does
        self._next()

    def _next(self) -> None:
        while self._waiting:
            account, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[account] = turns
            if not turn.done():
                turn.set_result(None)  # whoever it is begins before anybody else finds it free
                return
        self._busy = False
