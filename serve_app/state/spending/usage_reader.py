"""Usage for requests that ask for it: looked up in the store, off the event loop."""

from __future__ import annotations

import asyncio

from serve_app.api.errors import NotFound
from serve_app.state.protocols import UsageStore
from serve_app.state.reader import ReadPool, plausible
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.usage import UsagePage, UsageQuery

# An entry may be on its way to the store.
ON_ITS_WAY_S = 0.5


class UsageReader:
    """All raise `StoreAway` while the store cannot be reached."""

    def __init__(self, store: UsageStore, reader: ReadPool) -> None:
        self._store = store
        self._reader = reader

    async def sums(self, query: UsageQuery) -> UsagePage:
        return await self._reader.run(self._store.sums, query)

    async def entries(self, query: UsageQuery) -> list[Entry]:
        return await self._reader.run(self._store.entries, query)

    async def receipt(self, account: str | None, request_id: str) -> list[Entry]:
        """The entries of one request; ``account`` None: whosever it was. Raises `NotFound`."""
        if plausible(request_id):
            for wait in (ON_ITS_WAY_S, 0.0):
                if found := await self._reader.run(self._store.receipt, account, request_id):
                    return found
                await asyncio.sleep(wait)
        raise NotFound(f"No entry of a request {request_id[:64]} is kept here; one that used nothing has none.")
