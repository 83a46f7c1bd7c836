"""The places of one model in one gateway, shared among accounts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    places: int = 0
    weight: float = 1.0


class Places:
    """Who holds how many of ``limit`` places.

    While there are free ones, anybody gets them: an account alone may hold all. Once they are taken, an account still
    gets those of its share, which is ``limit`` divided by weight among the accounts that hold places, and at least one
    request's. So the account that floods is refused, and no other. Nothing is taken away for that: k equal accounts
    that come one after the other hold at most ``limit * (1 + 1/2 + ... + 1/k)``.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self.taken = 0

    def held(self, account: str) -> int:
        return self._held[account].places if account in self._held else 0

    def share(self, account: str, weight: float, limit: int) -> float:
        """Places that the account is due among those that hold some now."""
        others = sum(held.weight for name, held in self._held.items() if name != account)
        return limit * weight / (others + weight)

    def take(self, account: str, weight: float, streams: int, limit: int) -> bool:
        """Takes ``streams`` places, one for each stream of a request; False where the account has to be refused."""
        held = self.held(account)
        free = self.taken + streams <= limit
        if not free and held and held + streams > self.share(account, weight, limit):
            return False
        self._held[account] = _Held(held + streams, weight)
        self.taken += streams
        return True

    def give_back(self, account: str, streams: int) -> None:
        """Places of :meth:`take`, no longer needed."""
        self.taken -= streams
        held = self._held[account]
        held.places -= streams
        if not held.places:
            del self._held[account]
