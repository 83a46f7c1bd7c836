"""What a worker hears of its node's pool, for the gateways that send requests by what pools hold."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from serve_app.kv.client import KVClient
from serve_app.wire.load import KEY_BYTES, MAX_EVICTED, Pool

log = logging.getLogger(__name__)

# The pool answers when something has gone, and after so long in any case.
WAIT_S = 20.0
# After a pool could not be asked, because it is lost or there is none yet.
AGAIN_S = 1.0
# Keys that wait for a report; of more than that the oldest are not told.
WAITING = 4096


class PoolWatch:
    """Lives on the worker's event loop. :meth:`take` and :meth:`sent` belong to the worker's load reports."""

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._incarnation = ""
        self._tokens = 0
        self._evicted: deque[bytes] = deque()
        self._told = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, changed: Callable[[], None]) -> None:
        """Listens in the running loop; more than once is harmless. ``changed()``: there is another pool."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen(changed))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def take(self) -> Pool:
        """For a report."""
        keys = [self._evicted[n] for n in range(min(len(self._evicted), MAX_EVICTED))]
        self._told = len(keys)
        return Pool(self._incarnation, self._tokens, b"".join(keys))

    def sent(self) -> None:
        """What was taken last has been told."""
        for _ in range(min(self._told, len(self._evicted))):
            self._evicted.popleft()
        self._told = 0

    async def _listen(self, changed: Callable[[], None]) -> None:
        since = -1
        while True:
            try:
                news = await self._client.news(since, WAIT_S)
            except Exception as error:  # lost, or not there yet
                log.debug("no news of the pool (%s)", type(error).__name__)
                await asyncio.sleep(AGAIN_S)
                continue
            since = news.number
            if news.incarnation != self._incarnation:
                # What was asked about is another's.
                self._incarnation, self._tokens = news.incarnation, self._client.tokens(news.limit_bytes)
                self._evicted.clear()
                self._told = 0
                changed()
            else:
                self._evicted.extend(key[:KEY_BYTES] for key in news.keys)
                while len(self._evicted) > WAITING:
                    self._evicted.popleft()
                    self._told = max(self._told - 1, 0)  # that key was in the report that is under way
