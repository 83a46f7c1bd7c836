"""Long prompts get the workers that the others leave.

A prompt that takes most of the target for first tokens by itself makes everything that comes behind it late. Where such
prompts may take every worker, a burst of short ones finds none. So, while workers are busy, they get what the short
ones that have lately come do not need, and wait for it without holding up others. Where short ones need everything,
long ones still have a small part of the time, so that they go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.routing.fleet import Fleet
from serve_app.routing.recent import Recent
from serve_app.routing.types import RouteRequest

# Of the target for first tokens: what a prompt takes at least to count as long.
LONG = 0.6
# The share of the prefilling workers' time with prompts from which on it matters.
BUSY = 0.5
# Of that time, the part that prompts may be planned to take; and the least and the most that long ones get of it.
USE = 0.8
LEAST = 0.05
MOST = 0.34
# Of the prefilling workers, how many have nothing to do where one more may go whatever short prompts are expected.
IDLE = 0.5
# Seconds over which it is seen what short prompts need and what long ones have had.
WATCH_S = 20.0
HAD_S = 10.0


@dataclass(slots=True)
class Lanes:
    """``enter`` when a long prompt is sent, ``leave`` when it is computed or gone."""

    ttft: float | None  # target, seconds; None: no prompt is long
    inside: int = 0
    _short: Recent = field(default_factory=lambda: Recent(WATCH_S, 2.0))  # seconds of short prompts that came
    _had: Recent = field(default_factory=lambda: Recent(HAD_S))  # seconds of long ones that were sent

    def measure(self, request: RouteRequest, seconds: float, now: float) -> None:
        """Marks a request whose prompt takes so many seconds alone. Batch requests have the time that they need."""
        counts = self.ttft is not None and request.priority != "batch"
        request.long = counts and seconds > LONG * (self.ttft or 0.0)
        if counts and not request.long:
            self._short.add(seconds, now)

    def enter(self, seconds: float, now: float) -> None:
        self.inside += 1
        self._had.add(seconds, now)

    def leave(self) -> None:
        self.inside -= 1

    def open(self, fleet: Fleet, now: float, gateways: int = 1) -> bool:
        """Whether another long prompt may go. ``gateways``: each sends as many to the same workers."""
        if fleet.congestion < BUSY / (1.0 - BUSY):
            return True
        workers = list(fleet.workers.values())
        decoding = [w for w in workers if w.role == "decode"]
        workers = [w for w in workers if w.role != "decode"] or workers
        # Where links are slow, prompts are computed where they are decoded.
        beside = sum(w.prefilling / w.slow for w in decoding if w not in workers)
        able = (sum(1.0 / w.slow for w in workers) + beside) / gateways
        left = max(min(USE * able - self._short.rate(now), max(1.0, MOST * able)), LEAST * able)
        if sum(w.busy_until <= now for w in workers) >= IDLE * len(workers):
            left = max(left, IDLE * able)
        # At least half of a worker that another one would take has to be left.
        return self.inside + 0.5 <= left if self.inside else self._had.rate(now) < left
