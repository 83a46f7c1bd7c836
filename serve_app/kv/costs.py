"""Whether a worker fetches K/V or computes them again: predicted from what both have cost so far."""

from __future__ import annotations

from collections import Counter
from typing import Any

from serve_app.costs.transfers import Rate, Transfer

# Seconds before the first byte and bytes per second, until they are measured: views into shared memory, an NVMe disk
# read and checked, a 10 GbE network. Asking the node's own pool is how one knows, so that it counts as nothing.
PRIORS = {"node": (0.0, 2e9), "disk": (0.002, 5e8), "remote": (0.005, 2.5e8)}


class FetchCosts:
    """One engine's view. ``prefill``, prompt tokens per second, is the engine's own measurement
    (:class:`serve_app.engine.meter.StepMeter`); before the first one everything is worth a fetch.
    """

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
            "mb_per_s": {tier: round(t.per_s / 1e6, 1) for tier, t in self.tiers.items()},
            "latency_ms": {tier: round(t.latency_s * 1e3, 2) for tier, t in self.tiers.items()},
        }
