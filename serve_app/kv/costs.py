"""Whether a worker fetches K/V or computes them again: predicted from what both have cost so far.

What has never been measured is a guess, and what is never fetched is never measured again. So a little of the time that
goes into computing what could have been fetched is spent on trying: once it would have paid for a needless fetch many
times over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from serve_app.costs.transfers import Rate, Transfer

# Seconds before the first byte and bytes per second, until they are measured, where nothing is known of the machine
# (:mod:`serve_app.kv.machine`): shared memory, an NVMe disk read and checked, a network. Asking the node's own pool is
# how one knows, so that it counts as nothing.
PRIORS = {"node": (0.0, 2e9), "disk": (0.002, 5e8), "remote": (0.005, 2.5e8)}
# Of the time spent on computing what a tier holds, the share that trying it may cost: of a guess, of a measurement.
TRY_GUESS = 0.2
TRY_MEASURED = 0.02


class FetchCosts:
    """One engine's view. ``prefill``, prompt tokens per second, and ``copies``, bytes per second into its blocks, are
    the engine's own measurements (:class:`serve_app.engine.meter.StepMeter`,
    :class:`serve_app.engine.kv_cache.KVCache`); before the first of prefill everything is worth a fetch.
    """

    def __init__(self, priors: Mapping[str, tuple[float, float]] = PRIORS) -> None:
        """``priors``: of this machine, see :mod:`serve_app.kv.machine`."""
        self.tiers = {tier: Transfer(*prior) for tier, prior in priors.items()}
        self.prefill = Rate()
        self.copies = Rate()
        self.decisions: Counter[str] = Counter()
        self._computed_s: defaultdict[str, float] = defaultdict(float)  # of what a tier holds, since it was last tried
        self._measured: set[str] = set()

    @property
    def token_seconds(self) -> float:
        """What computing one token takes; 0 while unknown."""
        rate = self.prefill.value
        return 1.0 / rate if rate else 0.0

    def copy_seconds(self, nbytes: int) -> float:
        """From where a fetch has brought ``nbytes`` into the engine's blocks; 0 while unknown."""
        rate = self.copies.value
        return nbytes / rate if rate else 0.0

    def estimates(self) -> dict[str, tuple[float, float]]:
        """By tier, seconds before the first byte and seconds of each byte, until it is in the engine's blocks."""
        copy = self.copy_seconds(1)
        return {tier: (transfer.latency_s, 1.0 / transfer.per_s + copy) for tier, transfer in self.tiers.items()}

    def measured(self, tier: str, nbytes: int, seconds: float) -> None:
        """A fetch from ``tier`` has taken so long, without the copy into the engine's blocks."""
        if nbytes > 0:
            self._measured.add(tier)
            self._computed_s[tier] = 0.0
            self.tiers[tier].add(nbytes, seconds)

    def worth(self, tier: str, tokens: int, nbytes: int, queued_bytes: int = 0, busy_s: float = 0.0) -> bool:
        """Whether ``nbytes`` from ``tier`` are predicted to be here sooner than ``tokens`` are computed, or are worth a
        try. ``queued_bytes`` come over the same link before; the engine computes other prompts for ``busy_s``.
        """
        compute_s = tokens * self.token_seconds
        transfer = self.tiers[tier]
        fetch_s = transfer.seconds(nbytes) + queued_bytes / transfer.per_s + self.copy_seconds(nbytes) - busy_s
        if not compute_s or fetch_s < compute_s:
            self.decisions[f"{tier}: fetch"] += 1
            return True
        self._computed_s[tier] += compute_s
        share = TRY_MEASURED if tier in self._measured else TRY_GUESS
        if share * self._computed_s[tier] >= fetch_s - compute_s:
            self._computed_s[tier] = 0.0
            self.decisions[f"{tier}: tried"] += 1
            return True
        self.decisions[f"{tier}: computing is cheaper"] += 1
        return False

    def report(self) -> dict[str, Any]:
        """What was decided and from which numbers."""
        rate = self.prefill.value
        return {
            "decisions": dict(self.decisions),
            "prefill_tokens_per_s": round(rate) if rate else None,
            "mb_per_s": {tier: round(t.per_s / 1e6, 1) for tier, t in self.tiers.items()},
            "latency_ms": {tier: round(t.latency_s * 1e3, 2) for tier, t in self.tiers.items()},
        }
