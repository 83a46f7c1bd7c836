"""Which faults are on, and what clients may see of them meanwhile."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from math import inf
from typing import Any

# What a client may be allowed to see; UNSTORED: a refusal of what only the store can keep, such as resumable streams.
REFUSED, BROKEN, UNSTORED = "refused", "broken", "unstored"
LISTED = 40  # of what broke; the rest is counted


@dataclass(slots=True)
class Window:
    """One fault. ``end`` is when nothing of it may be seen any more: not known while it is on."""

    fault: str
    allowed: frozenset[str]
    start: float
    end: float = inf


@dataclass(slots=True)
class Weather:
    """Times are of the monotonic clock; ``broke`` lists what no fault allowed, seconds from ``started``."""

    started: float = field(default_factory=time.monotonic)
    windows: list[Window] = field(default_factory=list)
    broke: list[dict[str, Any]] = field(default_factory=list)
    broken: int = 0

    def begin(self, fault: str, allowed: frozenset[str]) -> Window:
        window = Window(fault, allowed, time.monotonic())
        self.windows.append(window)
        return window

    def during(self, start: float, end: float) -> list[Window]:
        return [w for w in self.windows if w.start <= end and start <= w.end]

    def saw(self, what: str, kind: str, ask: str, since: float) -> bool:
        """Something that a client saw of a request that it sent at ``since``; whether a fault allowed its ``kind``."""
        windows = self.during(since, time.monotonic())
        kinds = {kind, REFUSED} if kind == UNSTORED else {kind}
        if any(kinds & window.allowed for window in windows):
            return True
        self.violation(what, ask=ask, asked_at=round(since - self.started, 1), during=[w.fault for w in windows])
        return False

    def violation(self, what: str, **details: Any) -> None:
        self.broken += 1
        print(f"           BROKE: {what[:400]} {details}", file=sys.stderr, flush=True)
        if len(self.broke) < LISTED:
            self.broke.append({"at": round(time.monotonic() - self.started, 1), "what": what, **details})
