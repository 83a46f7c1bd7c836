"""How many streams each tenant has, and places kept for a moment for tenants that will be back."""

from __future__ import annotations

from collections import Counter, deque

# A client that sends its next request when it has the answer to the last is back within this.
KEEP_S = 0.1


class Streams:
    """Streams by tenant.

    Where the target between tokens bounds how many streams run, a tenant with ten requests waiting takes every place
    the moment it is free, and a tenant that asks anew after each answer finds none. So a place that a tenant below its
    share leaves is kept for it for ``keep`` seconds, as disks wait for the next request of a reader before they move
    their heads (Iyer and Druschel 2001, anticipatory scheduling).
    """

    def __init__(self, keep: float = KEEP_S) -> None:
        self._keep = keep
        self._running: Counter[str] = Counter()  # a tenant without streams is not in it
        self._kept: dict[str, deque[float]] = {}  # until when, oldest first

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, tenant: str, streams: int = 1) -> None:
        self._running[tenant] += streams
        if (kept := self._kept.get(tenant)) is not None:
            for _ in range(min(streams, len(kept))):
                kept.popleft()
            if not kept:
                del self._kept[tenant]

    def end(self, tenant: str, now: float | None, streams: int = 1) -> None:
        """``now`` None: the client has left, or the request goes on elsewhere."""
        self._running -= Counter({tenant: streams})
        if now is not None and self._running and self.below_share(tenant):
            self._kept.setdefault(tenant, deque()).extend([now + self._keep] * streams)

    def below_share(self, tenant: str) -> bool:
        """Whether other tenants have more streams than one that has a request."""
        others = len(self._running) - (tenant in self._running)
        return self._running[tenant] < self._running.total() / (others + 1)

    def kept_from(self, tenant: str, now: float) -> int:
        """Places that are kept for others."""
        for other in list(self._kept):
            kept = self._kept[other]
            while kept and kept[0] <= now:
                kept.popleft()
            if not kept:
                del self._kept[other]
        return sum(len(kept) for other, kept in self._kept.items() if other != tenant)
