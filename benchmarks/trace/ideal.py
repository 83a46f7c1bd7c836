"""How early first tokens could be at all: prompts alone, everything known, an unlimited cache, nothing to move.

A reference for what routing and scheduling can still gain, not a policy: no worker decodes, every prompt that waits is
known to all, and the one with the fewest tokens to compute goes first, which is close to the best there is for a
percentile below the last. Step costs are those of :mod:`benchmarks.trace.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import ceil

from benchmarks.trace.engine import P0, P1, P2, DecodeCost, decode_cost
from benchmarks.trace.requests import TraceRequest
from benchmarks.trace.shapes import shaped
from benchmarks.trace.spec import ClusterSpec

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


# Shares of the requests with least work, of which the best is what everything known could have kept.
KEPT = (1.0, 0.97, 0.95, 0.93, 0.91, 0.9)


def known_rate(
    trace: Sequence[TraceRequest], missed: Sequence[int], spec: ClusterSpec, shape: str, share: float
) -> float:
    """The highest multiple of the trace's rate at which ``share`` of all first tokens are in time where everything is
    known and nothing has to be moved: those that take most are left out from the start, or none; the shortest goes
    first, on any worker from step to step; what can't be in time any more is left; streams take the least that they
    can. ``missed``: tokens to compute of each request, if all before it have been.
    """
    cost = decode_cost(spec.decode_cost, spec.kv_tokens)
    fill = spec.kv_tokens
    while fill > 1 and cost.base + (cost.token + cost.square * fill) * fill > spec.itl_target:
        fill = fill * 15 // 16  # streams of a fuller worker come too late
    tokens = {request.id: count for request, count in zip(trace, missed, strict=True)}
    streams = {r.id: work(r, 0, cost, fill) for r in trace}
    order = sorted(trace, key=lambda r: work(r, tokens[r.id], cost, fill))

    def holds(rate: float) -> bool:
        replayed = shaped(trace, shape, rate)
        span = max(replayed[-1].at - replayed[0].at, 1e-9)
        for part in KEPT:
            kept = {request.id for request in order[: round(part * len(order))]}
            taken = sum(streams[name] for name in kept) / span
            if taken >= spec.workers:
                continue
            some = [request for request in replayed if request.id in kept]
            # Streams take a part of every worker's time, or some workers whole.
            ways = ((spec.workers, spec.workers / (spec.workers - taken)), (spec.workers - ceil(taken), 1.0))
            if any(_in_time(some, tokens, spec, *way) >= share * len(trace) for way in ways):
                return True
        return False

    low, high = 0.0, 64.0
    while high > max(low, 0.05) * 1.02:
        middle = (max(low, 0.05) * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _in_time(
    requests: Sequence[TraceRequest], tokens: dict[str, int], spec: ClusterSpec, workers: int, slow: float
) -> int:
    """How many prompts are computed by their deadlines, on ``workers`` that take ``slow`` times as long for a step."""

    def alone(count: int) -> float:
        full, rest = divmod(count, spec.chunk)
        return slow * (full * step_seconds(spec.chunk) + (step_seconds(rest) if rest else 0.0))

    left = [tokens[request.id] for request in requests]
    events = [(request.at, index, 0) for index, request in enumerate(requests)]
    waiting: list[tuple[int, int]] = []
    free, good = workers, 0
    heapify(events)
    while events:
        now = events[0][0]
        while events and events[0][0] <= now:
            _, index, computed = heappop(events)
            free += computed > 0
            left[index] -= computed
            if left[index] > 0:
                heappush(waiting, (left[index], index))
            else:
                good += now - requests[index].at <= spec.ttft_target
        while free and waiting:
            count, index = heappop(waiting)
            if now + alone(count) <= requests[index].at + spec.ttft_target:
                computed = min(count, spec.chunk)
                heappush(events, (now + slow * step_seconds(computed), index, computed))
                free -= 1
    return good


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
