"""Look-ups in the store for requests that ask for what lies there, off the event loop and within a bound of time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from serve_app.api.errors import StoreAway
from serve_app.state.errors import Away

log = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ReadPool:
    """At most ``threads`` look-ups at a time; a thread begins with the first."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="state-read")

    async def run(self, look: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Raises `StoreAway`."""
        return await in_time(self._pool.submit(look, *args, **kwargs), look, TIMEOUT_S)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


async def in_time(asked: Future[_T], what: Callable[..., object], limit_s: float) -> _T:
    """What ``asked``, which does ``what`` in a thread, has got from the store. It goes on where it takes longer than
    ``limit_s``, and the log tells then what it was waiting for. Raises `StoreAway`.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(asked)
    except Away as error:
        raise StoreAway from error
    except TimeoutError:
        # One that has not begun has been cancelled with its waiter.
        place = "all threads were busy" if asked.cancelled() else "the store has not answered"
        log.warning("%s took longer than %.1f s: %s", getattr(what, "__qualname__", what), limit_s, place)
        raise StoreAway from None


def plausible(name: str) -> bool:
    """Whether an id that a client sends could be one of ours; a database need not be asked for others, and PostgreSQL
    takes no NUL in a text.
    """
    return 0 < len(name) <= 200 and name.isascii() and name.isprintable()
