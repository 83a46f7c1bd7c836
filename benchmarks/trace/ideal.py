"""How early first tokens could be at all: prompts alone, everything known, an unlimited cache, nothing to move.

A reference for what routing and scheduling can still gain, not a policy: no worker decodes, every prompt that waits is
known to all, and the one with the fewest tokens to compute goes first, which is close to the best there is for a
percentile below the last. Step costs are those of :mod:`benchmarks.trace.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from benchmarks.trace.engine import P0, P1, P2, DecodeCost
from benchmarks.trace.requests import TraceRequest

# What a worker that helps with a prompt adds to each step: a layer's K/V has to get there before its attention.
HOP_S = 0.004


def step_seconds(tokens: int, workers: int = 1) -> float:
    """A step with ``tokens`` of one prompt divided among ``workers``, each one layer behind the other."""
    return P0 + (P1 * tokens + P2 * tokens * tokens) / workers + (HOP_S if workers > 1 else 0.0)


def ideal_ttft(
    arrivals: Sequence[float], tokens: Sequence[int], workers: int, chunk: int, *, shared: bool = False
) -> list[float]:
    """Seconds from each prompt's arrival until its ``tokens`` are computed, ``chunk`` of them a step at most.

    ``shared``: workers that would be idle help with the prompts of others, from one step to the next. Otherwise a
    prompt stays where it began.
    """
    events: list[tuple[float, int, int, int]] = []  # time, prompt, tokens computed, workers that are free then
    for index, at in enumerate(arrivals):
        heappush(events, (at, index, 0, 0))
    left = list(tokens)
    waiting: list[tuple[int, int]] = []
    free, found = workers, [0.0] * len(left)
    while events:
        now = events[0][0]
        steps = []
        while events and events[0][0] <= now:
            _, index, computed, helped = heappop(events)
            left[index] -= computed
            free += helped
            if not computed:
                heappush(waiting, (left[index], index))
            elif left[index] > 0:
                steps.append(index)
            else:
                found[index] = now - arrivals[index]
        free -= len(steps)
        while free and waiting:
            steps.append(heappop(waiting)[1])
            free -= 1
        helpers = _helpers([min(left[i], chunk) for i in steps], free) if shared else [1] * len(steps)
        free -= sum(helpers) - len(steps)
        for index, count in zip(steps, helpers, strict=True):
            computed = min(left[index], chunk)
            heappush(events, (now + step_seconds(computed, count), index, computed, count))
    return found


def work(request: TraceRequest, missed: int, decode: DecodeCost, kv_tokens: int) -> float:
    """Seconds of one worker that a request takes at least: its missed tokens in steps of the cheapest size, and its
    share of decode steps of a worker whose cache is full, where each stream costs least.
    """
    step = (P0 / P2) ** 0.5
    full = decode.base + (decode.token + decode.square * kv_tokens) * kv_tokens
    context = request.prompt + request.output / 2
    return missed * (P0 / step + P1 + P2 * step) + request.output * full * context / kv_tokens


def rate_bounds(
    trace: Sequence[TraceRequest], missed: Sequence[int], workers: int, decode: DecodeCost, kv_tokens: int, share: float
) -> tuple[float, float]:
    """Multiples of the trace's rate at which workers that are never idle have just time for all requests, and for the
    ``share`` of them that takes least.
    """
    seconds = sorted(work(r, m, decode, kv_tokens) for r, m in zip(trace, missed, strict=True))
    span = max(trace[-1].at - trace[0].at, 1e-9)
    some = seconds[: max(1, round(share * len(seconds)))]
    return workers * span / sum(seconds), workers * span / sum(some)


def _helpers(steps: Sequence[int], free: int) -> list[int]:
    """Workers for each step of so many tokens: one, and of the ``free`` ones to where the share of each is largest."""
    counts = [1] * len(steps)
    while free and steps:
        largest = max(range(len(steps)), key=lambda i: steps[i] / counts[i])
        tokens, count = steps[largest], counts[largest]
        # A worker that saves next to nothing is better kept for what comes next.
        if step_seconds(tokens, count) - step_seconds(tokens, count + 1) < HOP_S:
            break
        counts[largest] += 1
        free -= 1
    return counts
