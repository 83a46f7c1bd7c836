"""Other arrivals of the same requests: without a recorder's clock ticks, and in bursts. Times are seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.trace.requests import TraceRequest

SHAPES = ("recorded", "jittered", "bursty")
# The recorder of the public traces noted times every three seconds.
TICK_S = 3.0
# Of each window's requests so many come in its first half.
WINDOW_S = 20.0
BURST = 0.75


def faster(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests at ``rate`` times their pace."""
    return [replace(request, at=request.at / rate) for request in trace]


def jittered(trace: Sequence[TraceRequest], seed: int = 0, tick: float = TICK_S) -> list[TraceRequest]:
    """Each request up to a tick later: as spread out as the clock could not show."""
    draw = random.Random(seed)
    return sorted((replace(r, at=r.at + draw.random() * tick) for r in trace), key=lambda r: r.at)


def bursty(trace: Sequence[TraceRequest], window: float = WINDOW_S, share: float = BURST) -> list[TraceRequest]:
    """The order and number of requests in each window stay; ``share`` of its time is squeezed into its first half."""

    def moved(at: float) -> float:
        begin, inside = at // window * window, (at % window) / window
        if inside < share:
            return begin + window * inside * 0.5 / share
        return begin + window * (0.5 + (inside - share) * 0.5 / (1.0 - share))

    return [replace(r, at=moved(r.at)) for r in trace]


def shaped(trace: Sequence[TraceRequest], shape: str, rate: float, seed: int = 0) -> list[TraceRequest]:
    """``trace`` at ``rate`` times its pace, in one of :data:`SHAPES`. Bursts last as long at any rate."""
    if shape == "recorded":
        return faster(trace, rate)
    spread = faster(jittered(trace, seed), rate)
    if shape == "jittered":
        return spread
    if shape == "bursty":
        return bursty(spread)
    raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
