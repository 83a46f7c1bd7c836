"""How slow workers are, as their roles are planned: as measured over half a minute, and equal unless clearly not.

What workers of one kind measure differs by a quarter and more, since each computes other things beside other processes.
Roles that followed it would move to and fro, and prompts and streams with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve_app.routing.costs import CostModel

# A factor that is less apart from the workers' mean counts as none, one that is the square of it apart as a whole one.
ALIKE = 1.3
_ALIKE = math.log(ALIKE)


class Speeds:
    """``tau``: seconds over which measurements are averaged, from equal on."""

    def __init__(self, costs: CostModel, tau: float) -> None:
        self._costs = costs
        self._tau = tau
        self._at: float | None = None
        self._logs: dict[str, float] = {}  # of the workers' factors

    def look(self, workers: Sequence[str], now: float) -> list[float]:
        """How many times as long as usual each of these workers takes; they are all that there are."""
        passed = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now
        part = 1.0 - math.exp(-passed / self._tau)
        logs = {}
        for worker in workers:
            log = self._logs.get(worker, 0.0)
            logs[worker] = log + part * (math.log(self._costs.slowness(worker)) - log)
        self._logs = logs
        mean = sum(logs.values()) / max(len(logs), 1)
        return [math.exp(mean + _calm(log - mean)) for log in logs.values()]


def _calm(log: float) -> float:
    return math.copysign(min(max(abs(log) - _ALIKE, 0.0) * 2.0, abs(log)), log)
