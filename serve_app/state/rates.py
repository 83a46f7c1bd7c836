"""Requests per minute, per account and task: decided from memory, counted together with the other gateways.

Windows are fixed minutes of the clock. A gateway knows its own requests at once, and those of the others as of the last
exchange with the store, which follows each request within a few hundredths of a second. So several gateways together
may let through what comes to the others within that time beyond the limit, and one gateway never does. While the store
is away each counts on from what it knew.

Headers: `Ratelimit` and `Ratelimit-Policy` as Cloudflare's API sends them (draft-ietf-httpapi-ratelimit-headers).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serve_app.api.errors import RateLimited
from serve_app.state.protocols import RateStore

WINDOW_S = 60


@dataclass(slots=True)
class _Count:
    """Of one account and task: requests that the store has, of all gateways, and own ones that it has not."""

    stored: int = 0
    fresh: int = 0


class RateLimiter:
    """``limits``: requests per minute by task; a task without an entry is not limited. ``wake`` has :meth:`exchange`
    called soon, by another thread. ``clock`` gives unix seconds.
    """

    def __init__(
        self,
        limits: Mapping[str, int],
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = dict(limits)
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Count] = {}
        self._untold: set[tuple[str, str]] = set()
        self._minute = 0

    def take(self, account: str, task: str) -> dict[str, str]:
        """Counts one request and gives the headers that tell of it. Raises `RateLimited` for one too many."""
        quota = self._limits.get(task)
        if quota is None:
            return {}
        now = self._clock()
        minute = int(now // WINDOW_S)
        with self._lock:
            if minute > self._minute:
                # Counts of a minute that is over are of no use to anybody.
                self._counts, self._untold, self._minute = {}, set(), minute
            count = self._counts.setdefault((account, task), _Count())
            count.fresh += 1
            self._untold.add((account, task))
            used = count.stored + count.fresh
        self._wake()
        reset = math.ceil((minute + 1) * WINDOW_S - now)
        headers = {
            "Ratelimit": f'"{task}";r={max(0, quota - used)};t={reset}',
            "Ratelimit-Policy": f'"{task}";q={quota};w={WINDOW_S}',
        }
        if used > quota:
            raise RateLimited(task, quota, reset, headers)
        return headers

    def exchange(self, store: RateStore) -> None:
        """Tells the store of own requests and hears of the others'. Raises :class:`serve_app.state.errors.Away`."""
        with self._lock:
            minute = self._minute
            told = {key: self._counts[key].fresh for key in self._untold}
            self._untold = set()
        if not told:
            return
        try:
            heard = store.add(minute, told)
        except BaseException:
            with self._lock:
                if self._minute == minute:
                    self._untold |= told.keys()
            raise
        with self._lock:
            if self._minute != minute:
                return
            for key, sent in told.items():
                count, (stored_minute, stored) = self._counts[key], heard[key]
                count.fresh -= sent
                # A store that is in the next minute already, by another gateway's clock, tells nothing of this one.
                count.stored = stored if stored_minute == minute else count.stored + sent
