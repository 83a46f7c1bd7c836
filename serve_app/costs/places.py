"""How the places of a worker are shared among accounts: what workers keep to, and what gateways predict by."""

from __future__ import annotations

from collections.abc import Iterable

# A request of an account below its share waits so long for a place that comes free by itself, before another account
# gives one back; and the least time from one place given back to the next.
PATIENCE_S = 0.5
GAP_S = 0.125
# For so long a request keeps its place, where others only want their turn.
TURN_S = 4.0


def share(places: int, weight: float, others: Iterable[tuple[int, float]]) -> float:
    """How many of ``places`` an account with this ``weight`` is due beside ``others``, who want so many each and have
    weights: what some do not want, the rest shares. At least one.
    """
    wanting = sorted(others, key=lambda other: other[0] / other[1])
    left, weights = float(places), weight + sum(other[1] for other in wanting)
    for wanted, theirs in wanting:
        if wanted > left * theirs / weights:
            break
        left -= wanted
        weights -= theirs
    return max(left * weight / weights, 1.0)
