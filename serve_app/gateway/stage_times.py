"""How long requests waited, prefilled and decoded, how long prompts and answers were, and how they ended: by model,
since the start of this gateway. What vLLM's own board reads beside latencies, which :mod:`serve_app.gateway.tally` has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import msgspec

from serve_app.tasks.work import Settled

# Upper borders in seconds and in tokens; above the last is one bucket more. vLLM's, and below its first ones some more.
SECONDS = (
    0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))
BORDERS = {
    "queue": SECONDS,
    "prefill": SECONDS,
    "decode": SECONDS,
    "inference": SECONDS,
    "prompt_tokens": TOKENS,
    "generation_tokens": TOKENS,
    "longest_choice": TOKENS,
}


class Histogram(msgspec.Struct, array_like=True):
    """``counts``: one more than there are borders. ``sum``: of what was observed."""

    counts: list[int]
    sum: float = 0.0


class StageTimes:
    """A subscriber of :class:`serve_app.tasks.work.Settlement`. ``ends``: how many requests of a model ended by a stop,
    by their length, or because their client left, in vLLM's words.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, dict[str, Histogram]] = {}
        self.ends: Counter[tuple[str, str]] = Counter()

    def __call__(self, settled: Settled) -> None:
        if settled.status == "left":
            self.ends[settled.model, "abort"] += 1
        if settled.status != "done":
            return
        self.ends[settled.model, "length" if settled.cut else "stop"] += 1
        usage = settled.usage
        observed: dict[str, float] = {"prompt_tokens": usage.prompt_tokens}
        if usage.completion_tokens:
            observed["generation_tokens"] = usage.completion_tokens
            observed["longest_choice"] = settled.longest or usage.completion_tokens
        if settled.queue_s is not None and settled.ttft_s is not None:
            observed["queue"] = settled.queue_s
            observed["prefill"] = settled.ttft_s - settled.queue_s
            observed["decode"] = settled.seconds - settled.ttft_s
            observed["inference"] = settled.seconds - settled.queue_s
        of = self.histograms.setdefault(settled.model, {})
        for name, value in observed.items():
            borders = BORDERS[name]
            if (found := of.get(name)) is None:
                found = of[name] = Histogram([0] * (len(borders) + 1))
            found.counts[bisect_left(borders, value)] += 1
            found.sum += value
