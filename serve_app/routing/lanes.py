"""Long prompts do not take all workers at once.

A prompt that takes most of the target for first tokens by itself makes everything that comes behind it late. Where such
prompts may take every worker, a burst of short ones finds none. So, while workers are busy, they hold a share of them
at most, and wait without holding up others; the rest is for prompts that can be in time.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.routing.fleet import Fleet
from serve_app.routing.types import RouteRequest

# Of the target for first tokens: what a prompt takes at least to count as long.
LONG = 0.6
# Of the workers that prefill; and the share of their time with prompts from which on it matters.
SHARE = 0.34
BUSY = 0.5


@dataclass(slots=True)
class Lanes:
    """``enter`` when a long prompt is sent, ``leave`` when it is computed or gone."""

    ttft: float | None  # target, seconds; None: no prompt is long
    inside: int = 0

    def measure(self, request: RouteRequest, seconds: float) -> None:
        """Marks a request whose prompt takes so many seconds alone. Batch requests have the time that they need."""
        request.long = self.ttft is not None and request.priority != "batch" and seconds > LONG * self.ttft

    def open(self, fleet: Fleet) -> bool:
        """Whether another long prompt may go."""
        if not self.inside or fleet.congestion < BUSY / (1.0 - BUSY):
            return True
        able = sum(w.role != "decode" for w in fleet.workers.values()) or len(fleet)
        return self.inside < max(1, int(SHARE * able))
