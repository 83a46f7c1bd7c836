"""Look-ups in the store for requests that ask for what lies there, off the event loop and within a bound of time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from serve_app.api.errors import StoreAway
from serve_app.state.errors import Away

TIMEOUT_S = 5.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ReadPool:
    """At most ``threads`` look-ups at a time; a thread begins with the first."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="state-read")

    async def run(self, look: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Raises `StoreAway`."""
        future = self._pool.submit(look, *args, **kwargs)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), TIMEOUT_S)
        except (Away, TimeoutError) as error:
            raise StoreAway from error

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def plausible(name: str) -> bool:
    """Whether an id that a client sends could be one of ours; a database need not be asked for others, and PostgreSQL
    takes no NUL in a text.
    """
    return 0 < len(name) <= 200 and name.isascii() and name.isprintable()
