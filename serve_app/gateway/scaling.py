"""How many workers each model had when, in which roles, and what the planner said: the changes, newest last.

Each gateway keeps what it has seen since its start.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

PERIOD_S = 1.0
MAX_CHANGES = 1000


class ScalingLog:
    """``read()``: the dispatchers' statistics by model, see
    :meth:`serve_app.gateway.dispatch.dispatcher.Dispatcher.stats`.
    """

    def __init__(self, read: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        self._read = read
        self._last: dict[str, dict[str, int]] = {}
        self.changes: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._look_always())

    def look(self, now: float) -> None:
        """Notes what has changed. ``now``: unix seconds."""
        for model, stats in self._read().items():
            workers = dict(sorted(Counter(f"{w['stage']}/{w['role']}" for w in stats["workers"]).items()))
            if self._last.get(model) != workers:
                self._last[model] = workers
                plan = stats["plan"]
                found = {"time": now, "model": model, "workers": workers, "needed": plan["needed"], "why": plan["why"]}
                self.changes.append(found)

    async def _look_always(self) -> None:
        while True:
            self.look(time.time())
            await asyncio.sleep(PERIOD_S)
