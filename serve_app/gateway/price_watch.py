"""Takes a changed price list over while the gateway runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from serve_app.catalog.price_file import PriceFile
from serve_app.catalog.price_list import Prices

# A change is taken over at the second look that finds it.
LOOK_S = 0.25


class PriceWatch:
    """``prices`` has what ``file`` says."""

    def __init__(self, file: PriceFile, prices: Prices) -> None:
        self.file = file
        self._prices = prices
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self.file.changed() and (listed := await asyncio.to_thread(self.file.take)) is not None:
                # Requests that have begun keep the price that they have.
                self._prices.adopt(listed)
