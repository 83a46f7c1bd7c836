"""What an engine's steps have cost lately, for predictions made elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from typing import Any

# The mean forgets a step's share of this much with every newer step.
SMOOTHING = 0.1
KEPT = 16


@dataclass(slots=True, frozen=True)
class StepCost:
    """One step: prompt tokens computed, tokens of context before them, sequences that generated, tokens of context
    these attended to, and seconds.
    """

    prefill_tokens: int
    context_tokens: int
    decode_seqs: int
    kv_tokens: int
    seconds: float


class StepMeter:
    """Written by the engine's thread, read by others: every method is one step under the interpreter's lock."""

    def __init__(self) -> None:
        self.mean_seconds = 0.0
        self._recent: deque[StepCost] = deque(maxlen=KEPT)

    def record(self, scheduled: list[Any], seconds: float) -> None:
        """Adds a step; ``scheduled`` are its :class:`~serve_app.engine.scheduler.Scheduled` items."""
        prefill = context = seqs = kv = 0
        for item in scheduled:
            new = min(item.start + item.count, item.request.prompt_len) - item.start
            if new > 0:
                prefill += new
                context += item.start
            else:
                seqs += 1
                kv += item.start
        self._recent.append(StepCost(prefill, context, seqs, kv, seconds))
        self.mean_seconds += (SMOOTHING if self.mean_seconds else 1.0) * (seconds - self.mean_seconds)

    def take(self) -> list[tuple]:
        """The latest steps that nobody has taken yet, oldest first, as plain tuples."""
        taken = []
        while self._recent:
            taken.append(astuple(self._recent.popleft()))
        return taken
