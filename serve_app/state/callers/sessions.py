"""Sessions of people who have signed in with a key: rows in the store, known to every gateway from memory.

A session does what its key may do, for as long as the key is good. It ends when it is signed out, when nobody has used
it for :data:`IDLE_S`, and after :data:`LONGEST_S`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from serve_app.state.reader import ReadPool

IDLE_S = 3600.0
LONGEST_S = 12 * 3600.0
# How often the store is told that a session is still used.
USED_EVERY_S = 300.0
# Sessions of one key; a further one ends the oldest.
MOST_OF_A_KEY = 100


@dataclass(slots=True, frozen=True)
class Session:
    """``hash``: SHA-256 of its id, in hex, which nobody but the browser keeps. ``key``: SHA-256 of the key, in hex; a
    key that is rolled has another. ``code``: SHA-256 of the one-time code that it began with, or "". Times: unix
    seconds.
    """

    hash: str
    key: str
    started: float
    used: float
    code: str = ""

    @property
    def expires(self) -> float:
        return min(self.used + IDLE_S, self.started + LONGEST_S)


class SessionStore(Protocol):
    """All calls block and raise `Away`. A change bumps the revision :attr:`NAME`."""

    NAME: str

    def add(self, session: Session) -> bool:
        """False where its code has begun one already."""

    def all(self, now: float) -> list[Session]:
        """Those that have not ended and are not older than any can be."""

    def end(self, hash: str) -> None: ...

    def used(self, when: Mapping[str, float]) -> None: ...

    def trim(self, now: float) -> None: ...


class SessionBook:
    """What one gateway knows. Another thread may :meth:`fill` it at any time. ``reader`` keeps the store off the event
    loop.
    """

    def __init__(self, store: SessionStore, reader: ReadPool) -> None:
        self._store = store
        self._reader = reader
        self._known: dict[str, Session] = {}
        self._told: dict[str, float] = {}

    def find(self, hash: str, now: float) -> Session | None:
        """The session, which is used by that."""
        known = self._known
        found = known.get(hash)
        if found is None or found.expires <= now:
            return None
        # One request a second is as good as all of them.
        if now - found.used > 1.0:
            # Into what it was found in: it may have ended meanwhile.
            found = known[hash] = replace(found, used=now)
        return found

    async def begin(self, session: Session) -> bool:
        """False where its code has begun one already. Raises `StoreAway`."""
        new = await self._reader.run(self._store.add, session)
        if new:
            self._known[session.hash] = session
        return new

    async def end(self, hash: str) -> None:
        """This gateway refuses it at once, the others within a second. Raises `StoreAway`."""
        self._known.pop(hash, None)
        await self._reader.run(self._store.end, hash)
        self._known.pop(hash, None)

    async def learn(self, now: float) -> None:
        """Reads what has begun at other gateways. Raises `StoreAway`."""
        await self._reader.run(self.fill, now)

    def fill(self, now: float) -> None:
        """Replaces what is known by what the store has, which need not know the last use yet. Blocks; raises `Away`."""
        found, before = self._store.all(now), self._known
        self._told = {session.hash: session.used for session in found}
        self._known = {s.hash: max(s, before.get(s.hash, s), key=lambda each: each.used) for s in found}

    def tell(self) -> None:
        """Tells the store which sessions are still used. Blocks; raises `Away`."""
        told, known = self._told, list(self._known.values())
        late = {s.hash: s.used for s in known if s.used - told.get(s.hash, s.started) > USED_EVERY_S}
        self._store.used(late)
        told.update(late)
