"""What moving K/V between tiers costs: a latency and a rate for each tier, followed by decayed means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Engine's own blocks, this node's pool, another's, pool's files; and an adapter that is loaded, measured in bytes.
Tier = Literal["worker", "node", "remote", "disk", "adapter"]

# What the priors count for, and how much of the past counts at all, in seconds of measured work.
PRIOR_S = 0.25
MEMORY_S = 5.0
# Smaller transfers say something about latency, larger ones about bandwidth.
LARGE_BYTES = 1 << 20
LATENCY_WEIGHT = 0.1


@dataclass(slots=True, frozen=True)
class FetchSample:
    """One fetch from a tier as measured: tokens copied into engine blocks (of an adapter: bytes), and seconds."""

    tier: Tier
    tokens: int
    seconds: float


@dataclass(slots=True, frozen=True)
class TierCost:
    """What a worker takes a fetch from a tier to cost: seconds before the first token, and of each."""

    tier: Tier
    latency: float
    token: float


class Rate:
    """Amount per second: a quotient of decayed sums, so that a long measurement counts for more than a short one."""

    def __init__(self, prior: float | None = None) -> None:
        self._seconds = PRIOR_S if prior else 0.0
        self._amount = PRIOR_S * prior if prior else 0.0

    @property
    def value(self) -> float | None:
        """None before the first measurement, if there is no prior."""
        return self._amount / self._seconds if self._seconds else None

    def add(self, amount: float, seconds: float) -> None:
        self._amount += amount
        self._seconds += max(seconds, 1e-9)
        if self._seconds > MEMORY_S:
            self._amount *= MEMORY_S / self._seconds
            self._seconds = MEMORY_S


class Transfer:
    """What moving K/V from one tier costs. Amounts are bytes, or tokens with ``large`` in tokens.

    ``latency_s`` of 0 means that the tier has none, and it is not measured.
    """

    def __init__(self, latency_s: float, per_s: float, *, large: int = LARGE_BYTES) -> None:
        self.latency_s = latency_s
        self._timed = latency_s > 0
        self._large = large
        self._rate = Rate(per_s)

    @property
    def per_s(self) -> float:
        """The amount that moves in a second."""
        return self._rate.value or 1.0

    def add(self, amount: int, seconds: float) -> None:
        """Takes in a measured transfer."""
        if amount >= self._large:
            self._rate.add(amount, max(seconds - self.latency_s, 0.01 * seconds))
        elif self._timed and amount:
            self.latency_s += LATENCY_WEIGHT * (min(seconds, 1.0) - self.latency_s)

    def seconds(self, amount: float) -> float:
        return self.latency_s + amount / self.per_s
