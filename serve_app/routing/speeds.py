"""How slow workers are, as their roles are planned: as measured over half a minute, and equal unless clearly not.

What workers of one kind measure differs by a quarter and more, since each computes other things beside other processes.
Roles that followed it would move to and fro, and prompts and streams with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.costs.steps import Slowness
from serve_app.routing.costs import CostModel

# A factor that is less apart from the workers' mean counts as none, one that is the square of it apart as a whole one.
ALIKE = 1.3
_ALIKE = math.log(ALIKE)


@dataclass(slots=True)
class _Mean:
    """Of one worker's factors, as logarithms."""

    prefill: float = 0.0
    decode: float = 0.0


class Speeds:
    """``tau``: seconds over which measurements are averaged, from equal on."""

    def __init__(self, costs: CostModel, tau: float) -> None:
        self._costs = costs
        self._tau = tau
        self._at: float | None = None
        self._means: dict[str, _Mean] = {}

    def look(self, workers: Sequence[str], now: float) -> list[Slowness]:
        """Of these workers, which are all that there are."""
        passed = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now
        part = 1.0 - math.exp(-passed / self._tau)
        self._means = {worker: self._means.get(worker) or _Mean() for worker in workers}
        for worker, mean in self._means.items():
            own = self._costs.slowness(worker)
            mean.prefill += part * (math.log(own.prefill) - mean.prefill)
            mean.decode += part * (math.log(own.decode) - mean.decode)
        prefill = _apart([mean.prefill for mean in self._means.values()])
        decode = _apart([mean.decode for mean in self._means.values()])
        return [Slowness(p, d) for p, d in zip(prefill, decode, strict=True)]


def _apart(logs: Sequence[float]) -> list[float]:
    mean = sum(logs) / max(len(logs), 1)
    return [math.exp(mean + _calm(log - mean)) for log in logs]


def _calm(log: float) -> float:
    return math.copysign(min(max(abs(log) - _ALIKE, 0.0) * 2.0, abs(log)), log)
