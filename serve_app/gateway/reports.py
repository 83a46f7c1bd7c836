"""How gateways know what runners of batches do: a runner reports each second while something runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from serve_app.api.errors import ApiError, StoreAway
from serve_app.gateway.history import read_live
from serve_app.state.deferred.reports import COUNTED_S, FRESH_S, Report
from serve_app.state.state import State

log = logging.getLogger("ray.serve")

EVERY_S = 1.0


class Reports:
    """``name``: of this process. ``live()`` and ``counted()``: what it would report, and ``busy()``: whether anything
    is under way.
    """

    def __init__(
        self,
        state: State,
        name: str,
        live: Callable[[], bytes],
        counted: Callable[[], bytes],
        busy: Callable[[], bool],
    ) -> None:
        self._state, self._name = state, name
        self._live, self._counted, self._busy = live, counted, busy
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """This process is a runner, and reports."""
        self._task = asyncio.ensure_future(self._report_always())

    def close(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.cancel()

    async def fresh(self) -> list[Report]:
        """Of runners that work; none while the store is away."""
        return await self._since(FRESH_S)

    async def counted(self) -> list[bytes]:
        """What runners have counted that work, or did a while ago."""
        return [report.counted for report in await self._since(COUNTED_S)]

    async def shown(self) -> list[dict[str, Any]]:
        """For the operator: each runner that works, and how many requests it has of which model."""
        now, found = time.time(), []
        for report in await self.fresh():
            running: dict[str, int] = {}
            for _, model, count in read_live(report.live).running:
                running[model] = running.get(model, 0) + count
            age = round(max(0.0, now - report.at), 1)
            found.append({"runner": report.runner, "age_s": age, "running": sum(running.values()), "models": running})
        return found

    async def _since(self, seconds: float) -> list[Report]:
        try:
            return await self._state.look(self._state.reports.since, time.time() - seconds)
        except StoreAway:
            return []

    async def _report_always(self) -> None:
        was_busy = True
        while True:
            await asyncio.sleep(EVERY_S)
            # Once more after the last request, which tells that there is none.
            busy = self._busy()
            if busy or was_busy:
                report = Report(self._name, time.time(), self._live(), self._counted())
                with suppress(ApiError):  # the store is away
                    await self._state.look(self._state.reports.put, report)
            was_busy = busy
