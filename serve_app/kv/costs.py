"""Whether K/V are fetched or computed again: predicted from what both have cost so far."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Seconds before the first byte and bytes per second, until they are measured: views into shared memory, an NVMe disk
# read and checked, a 10 GbE network. Asking the node's own pool is how one knows, so that it counts as nothing.
PRIORS = {"node": (0.0, 2e9), "disk": (0.002, 5e8), "remote": (0.005, 2.5e8)}
# What the priors count for, and how much of the past counts at all, in seconds of measured work.
PRIOR_S = 0.25
MEMORY_S = 5.0
# Smaller transfers say something about latency, larger ones about bandwidth.
LARGE_BYTES = 1 << 20
LATENCY_WEIGHT = 0.1


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
    """What moving bytes from one tier costs."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self._timed = latency_s > 0
        self._rate = Rate(bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        return self._rate.value or 1.0

    def add(self, nbytes: int, seconds: float) -> None:
        if nbytes >= LARGE_BYTES:
            self._rate.add(nbytes, max(seconds - self.latency_s, nbytes / 1e12))
        elif self._timed and nbytes:
            self.latency_s += LATENCY_WEIGHT * (min(seconds, 1.0) - self.latency_s)

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


class FetchCosts:
    """One engine's view. ``prefill`` is measured by its owner; before that everything is worth a fetch."""

    def __init__(self) -> None:
        self.tiers = {tier: Transfer(*prior) for tier, prior in PRIORS.items()}
        self.prefill = Rate()
        self.decisions: Counter[str] = Counter()

    @property
    def token_seconds(self) -> float:
        """What computing one token takes; 0 while unknown."""
        rate = self.prefill.value
        return 1.0 / rate if rate else 0.0

    def worth(self, tier: str, tokens: int, nbytes: int) -> bool:
        """Whether ``nbytes`` from ``tier`` are predicted to be here sooner than ``tokens`` are computed."""
        compute_s = tokens * self.token_seconds
        fetch = not compute_s or self.tiers[tier].seconds(nbytes) < compute_s
        self.decisions[f"{tier}: fetch" if fetch else f"{tier}: computing is cheaper"] += 1
        return fetch

    def report(self) -> dict[str, Any]:
        """What was decided and from which numbers."""
        rate = self.prefill.value
        return {
            "decisions": dict(self.decisions),
            "prefill_tokens_per_s": round(rate) if rate else None,
            "mb_per_s": {tier: round(t.bytes_per_s / 1e6, 1) for tier, t in self.tiers.items()},
            "latency_ms": {tier: round(t.latency_s * 1e3, 2) for tier, t in self.tiers.items()},
        }
