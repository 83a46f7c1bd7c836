"""Adapters as a gateway knows them: what was looked up lately is in memory, until the store says that some changed."""

from __future__ import annotations

import threading
from collections import OrderedDict

from serve_app.state.blobs.adapters import Adapter, AdapterStore
from serve_app.state.reader import ReadPool

# Looked up by so many names at most.
MAX_KNOWN = 20_000


class AdapterBook:
    """What is not in memory is asked of the store each time: an adapter that was just uploaded is found at once."""

    def __init__(self, store: AdapterStore, reader: ReadPool) -> None:
        self.store = store
        self._reader = reader
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Adapter] = OrderedDict()
        self._turn = 0

    async def find(self, account: str, which: str) -> Adapter | None:
        """One that can be used, by id or name. Raises `StoreAway`."""
        with self._lock:
            known, turn = self._known.get((account, which)), self._turn
            if known is not None:
                self._known.move_to_end((account, which))
                return known
        found = await self._reader.run(self.store.find, account, which)
        if found is not None and found.digest:
            with self._lock:
                # What was read before the last change may be old.
                if turn == self._turn:
                    self._known[account, which] = found
                    while len(self._known) > MAX_KNOWN:
                        self._known.popitem(last=False)
        return found

    def forget(self) -> None:
        """Some have changed."""
        with self._lock:
            self._turn += 1
            self._known.clear()
