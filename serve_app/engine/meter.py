"""What an engine's steps have cost lately: the one measurement of steps, for predictions here and in gateways."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import astuple
from typing import Any

from serve_app.costs.steps import StepSample
from serve_app.costs.transfers import Rate

# The mean forgets a step's share of this much with every newer step.
SMOOTHING = 0.1
KEPT = 16
# A step with fewer prompt tokens says nothing about prefill.
MEASURED_TOKENS = 32


class StepClock:
    """For how long the step in hand has lasted: ``with clock:`` is a step of one thread, others read it."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began: float | None = None

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began = None

    def restart(self) -> None:
        """The step in hand has come on: it counts as a new one."""
        if self._began is not None:
            self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """0 between two steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began


class StepMeter:
    """Written by the engine's thread, read by others: each read is one operation under the interpreter's lock.

    ``prefill``: prompt tokens per second, of steps that were mostly prompt. ``mean_seconds``: of a step, smoothed.
    """

    def __init__(self) -> None:
        self.mean_seconds = 0.0
        self.prefill = Rate()
        self._recent: deque[StepSample] = deque(maxlen=KEPT)

    def record(self, scheduled: list[Any], seconds: float) -> StepSample:
        """Adds a step, and returns it as measured; ``scheduled`` are its :class:`~serve_app.engine.step.Scheduled`
        items.
        """
        prefill = context = seqs = kv = others = 0
        for item in scheduled:
            new = min(item.start + item.count, item.request.prompt_len) - item.start
            if new > 0:
                prefill += new
                context += item.start
            else:
                seqs += 1
                kv += item.start
                others += item.count
        sample = StepSample(prefill, context, seqs, kv, seconds)
        self._recent.append(sample)
        if prefill >= MEASURED_TOKENS and prefill >= others:
            self.prefill.add(prefill, seconds)
        self.mean_seconds += (SMOOTHING if self.mean_seconds else 1.0) * (seconds - self.mean_seconds)
        return sample

    def take(self) -> list[tuple]:
        """The latest steps that have not been taken yet, oldest first, as plain tuples."""
        taken = []
        while self._recent:
            taken.append(astuple(self._recent.popleft()))
        return taken
