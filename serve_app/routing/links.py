"""The links over which K/V come into a worker or a node, as one gateway sees them: what is queued there, how busy they
are, and what that makes a transfer cost.

A link is a resource like a worker's time. What uses it delays what comes behind, so a second of a busy link costs more
than a second of an idle one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

# Seconds over which the share of time with transfers is measured, and the most that it is taken to be.
WATCH_S = 10.0
FULL = 0.95


@dataclass(slots=True)
class Link:
    """One direction; transfers follow one another. Times are seconds on the caller's clock.

    Some transfers are ready to go, others come out of prompts that are still computed. Such a one ends when its prompt
    is computed, if the link is free then, and leaves the link to others until then.
    """

    until: float = 0.0  # when what is ready to go will have passed
    reported_at: float = 0.0
    _coming: dict[Hashable, tuple[float, float]] = field(default_factory=dict)  # ready at, seconds
    _seconds: float = 0.0  # of transfers lately
    _at: float = 0.0

    def wait(self, now: float, ready: float | None = None) -> float:
        """Seconds until a transfer that is ``ready`` then (None: now) would have the link to itself."""
        free, by = self.until, now if ready is None else ready
        if self._coming:
            for at, seconds in sorted(self._coming.values()):
                if at > by:
                    break
                # What was ready when the worker reported is in its report.
                if at > self.reported_at:
                    free = max(at, free + seconds)
        return max(free - now, 0.0)

    def take(self, seconds: float, now: float) -> None:
        """Transfers of so many ``seconds`` go now."""
        if seconds > 0:
            self.until = max(self.until, now) + seconds
            self._use(seconds, now)

    def expect(self, name: Hashable, seconds: float, ready: float, now: float) -> None:
        """A transfer of so many ``seconds`` will be ready then, until :meth:`gone`."""
        if seconds > 0:
            self._coming[name] = (ready, seconds)
            self._use(seconds, now)

    def gone(self, name: Hashable) -> None:
        """It has arrived, or will not come any more."""
        self._coming.pop(name, None)

    def queued(self, seconds: float, now: float) -> None:
        """So many seconds of transfers are on their way or ready to go, as somebody has measured ``now``."""
        self.until, self.reported_at = now + seconds, now

    def congestion(self, now: float) -> float:
        """r / (1 - r) with r the share of time in which the link has lately been busy: for each second taken of it,
        what comes behind waits about so many seconds longer.
        """
        self._decay(now)
        busy = min(self._seconds / WATCH_S, FULL)
        return busy / (1.0 - busy)

    def _use(self, seconds: float, now: float) -> None:
        self._decay(now)
        self._seconds += seconds

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._seconds *= math.exp(-(now - self._at) / WATCH_S)
            self._at = now
