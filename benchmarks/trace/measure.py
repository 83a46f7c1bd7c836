"""Percentiles and goodput, refusals counted as failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_BASE = 1.005  # a bin's width: percentiles are exact to half a per cent


class GapHistogram:
    """Gaps between tokens, seconds, weighted by how many streams saw them; logarithmic bins."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._log = math.log(_BASE)

    def add(self, seconds: float, count: int) -> None:
        at = round(math.log(max(seconds, 1e-6)) / self._log)
        self._counts[at] = self._counts.get(at, 0) + count

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def quantile(self, q: float) -> float:
        """NaN if empty."""
        left = q * self.total
        for at in sorted(self._counts):
            left -= self._counts[at]
            if left <= 0:
                return math.exp(at * self._log)
        return math.nan


def quantile(values: list[float], q: float, failed: int = 0) -> float:
    """The q-quantile of ``values`` and ``failed`` infinite ones (nearest rank)."""
    count = len(values) + failed
    if not count:
        return math.nan
    rank = max(0, math.ceil(q * count) - 1)
    ordered = sorted(values)
    return ordered[rank] if rank < len(ordered) else math.inf


@dataclass(slots=True)
class Result:
    """One policy at one rate. Times in seconds."""

    policy: str
    rate: float
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)  # mean gap of each request
    done: list[str] = field(default_factory=list)  # ids of requests that have ended
    good: int = 0
    span: float = 0.0
    gaps: GapHistogram = field(default_factory=GapHistogram)
    adapter_loads: int = 0
    link_bytes: int = 0  # that have come into workers
    stayed: int = 0  # requests decoded where they were prefilled
    far: int = 0  # requests decoded in another zone than their gateway's
    zone_bytes: int = 0  # that have come into a zone from another
    role_moves: int = 0
    roles: str = ""
    wall: float = 0.0

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def summary(self) -> dict[str, Any]:
        """Plain numbers, milliseconds where the name says so."""
        row: dict[str, Any] = {
            "policy": self.policy,
            "rate": self.rate,
            "requests": self.requests,
            "refused": self.refused,
            "hit_ratio": round(self.hit_ratio, 4),
        }
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            row[f"ttft_{name}_ms"] = _ms(quantile(self.ttft, q, self.refused))
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            row[f"itl_{name}_ms"] = _ms(self.gaps.quantile(q))
        row["goodput_per_s"] = round(self.good / self.span, 3) if self.span > 0 else 0.0
        row["good_share"] = round(self.good / max(self.requests, 1), 4)
        row["stayed_share"] = round(self.stayed / max(self.requests - self.refused, 1), 4)
        row["far_share"] = round(self.far / max(self.requests - self.refused, 1), 4)
        row["zone_gb"] = round(self.zone_bytes / 1e9, 1)
        row["adapter_loads"] = self.adapter_loads
        row["role_moves"] = self.role_moves
        row["roles"] = self.roles
        row["wall_s"] = round(self.wall, 2)
        return row


def _ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 2) if math.isfinite(seconds) else None


def table(rows: list[dict[str, Any]]) -> str:
    """Columns for reading."""
    names = ["policy", "rate", "hit_ratio", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms",
             "itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "refused", "good_share", "stayed_share", "roles"]  # fmt: skip
    cells = [names, *[["-" if row.get(n) is None else str(row.get(n)) for n in names] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )
