"""Counts of settled work, by model, status and kind of token, for metrics."""

from __future__ import annotations

from collections import Counter

from serve_app.tasks.work import Settled


class Tally:
    """A subscriber of :class:`serve_app.tasks.work.Settlement`. Counts since the start of this gateway."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by model and status
        self.tokens: Counter[tuple[str, str]] = Counter()  # by model and kind

    def __call__(self, settled: Settled) -> None:
        usage = settled.usage
        self.requests[settled.model, settled.status] += 1
        self.tokens[settled.model, "cached"] += usage.cached_tokens
        self.tokens[settled.model, "prompt"] += usage.prompt_tokens - usage.cached_tokens
        self.tokens[settled.model, "completion"] += usage.completion_tokens
