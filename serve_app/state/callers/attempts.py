"""How often an address may try to sign in with what is no key, at all gateways together.

An attempt is counted in the store before the key is looked at, and taken back if it is good: so many attempts at once,
at however many gateways, are not more than are allowed. While the store is away each gateway counts its own.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

from serve_app.api.errors import RateLimited, StoreAway
from serve_app.state.reader import ReadPool

WINDOW_S = 60.0
MOST = 10
# Addresses that one gateway remembers; those that failed longest ago are forgotten first.
_KNOWN = 10_000


class AttemptStore(Protocol):
    """All calls block and raise `Away`. Times: unix seconds."""

    def begin(self, address: str, now: float, window_s: float) -> tuple[float, int]:
        """When the address's window began, and how many attempts it has, this one included."""

    def forgive(self, address: str) -> None:
        """One attempt less."""

    def trim(self, before: float) -> None:
        """Forgets windows that began before."""


class Attempts:
    """Windows begin with the first attempt in them."""

    def __init__(self, store: AttemptStore, reader: ReadPool) -> None:
        self._store, self._reader = store, reader
        # As far as this gateway has seen.
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    async def begin(self, address: str, now: float) -> None:
        """Raises :class:`RateLimited` for one too many."""
        since, count = self._of(address, now)
        if count < MOST:
            try:
                since, count = await self._reader.run(self._store.begin, address, now, WINDOW_S)
            except StoreAway:
                count += 1
        else:
            count += 1  # the store need not be asked by who is refused anyway
        self._seen[address] = since, count
        self._seen.move_to_end(address)
        while len(self._seen) > _KNOWN:
            self._seen.popitem(last=False)
        if count > MOST:
            wait_s = max(1.0, since + WINDOW_S - now)
            raise RateLimited(f"{MOST} wrong keys within a minute. Wait a moment.", wait_s, {})

    async def succeeded(self, address: str, now: float) -> None:
        """The attempt that has begun was a good one."""
        since, count = self._of(address, now)
        self._seen[address] = since, max(0, count - 1)
        with suppress(StoreAway):  # then it was counted here alone
            await self._reader.run(self._store.forgive, address)

    def _of(self, address: str, now: float) -> tuple[float, int]:
        since, count = self._seen.get(address, (now, 0))
        return (now, 0) if now - since >= WINDOW_S else (since, count)
