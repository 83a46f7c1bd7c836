"""Goodput: the highest rate at which so many requests meet both latency targets, found by bisection.

A rate is tried on the whole trace. It holds if at least ``share`` of the requests had their first token in time and a
mean gap between tokens within the target; refused requests are failures. A run ends as soon as it can't hold any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SHARE = 0.9
# Rates are told apart to this factor; and the least and the largest that are tried.
PRECISION = 1.03
LOWEST, HIGHEST = 0.05, 64.0

# (variant, rate): the summary of a run, "good_share" in it; at most so many requests may fail before it ends.
Try = Callable[[str, float], dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Found:
    """``rate`` is a multiple of the trace's; ``row`` the run at that rate. No rate holds: 0.0 and the lowest's run."""

    variant: str
    rate: float
    row: dict[str, Any]
    runs: int


def highest(tries: Try, variants: Sequence[str], start: float = 4.0, share: float = SHARE) -> Found:
    """The best of ``variants`` at its highest rate. Each but the first is tried above the best rate so far only."""
    best: Found | None = None
    runs = 0
    for variant in variants:
        low, high = (0.0, None) if best is None else (best.rate, None)
        rate = start if best is None or not best.rate else best.rate * PRECISION
        row: dict[str, Any] | None = None
        while high is None or high > max(low, LOWEST) * PRECISION:
            found = tries(variant, rate)
            runs += 1
            if found["good_share"] >= share:
                low, row = rate, found
                rate = min(rate * 1.5, HIGHEST) if high is None else (low * high) ** 0.5
                if low >= HIGHEST:
                    break
            else:
                if best is not None and row is None and low == best.rate:
                    break  # no better than what there is
                high = rate
                if rate <= LOWEST:
                    row = row or found
                    break
                rate = (low * high) ** 0.5 if low else max(high / 1.5, LOWEST)
        if row is not None and (best is None or low > best.rate):
            best = Found(variant, low, row, 0)
    assert best is not None
    return Found(best.variant, best.rate, best.row, runs)
