"""What work costs on the workers of one model, as a gateway predicts it: steps, and fetches from a tier.

Priors are guesses for the hardware; both parts follow what workers measure (:mod:`serve_app.costs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.costs.steps import StepModel, StepSample
from serve_app.costs.transfers import LARGE_BYTES, FetchSample, Tier, TierCost, Transfer

# A smaller fetch says something about latency, a larger one about bandwidth.
LARGE_TOKENS = 64
# So many workers' steps are all taken in; of more workers the same number, a part of each one's.
MEASURED_WORKERS = 16


@dataclass(slots=True, frozen=True)
class CostPriors:
    """First guesses, in seconds. Defaults: an 8B model in bfloat16 on one H100, chunks of 128 KiB a token."""

    prefill_step: float = 8e-3  # p0
    prefill_token: float = 2e-5  # p1
    prefill_attention: float = 2e-10  # p2
    decode_step: float = 6e-3  # d0
    decode_seq: float = 2e-5  # d1
    decode_kv_token: float = 5e-8  # d2
    fetch_latency: dict[Tier, float] = field(
        default_factory=lambda: {"worker": 0.0, "node": 3e-3, "remote": 8e-3, "disk": 10e-3, "adapter": 10e-3}
    )
    fetch_token: dict[Tier, float] = field(
        default_factory=lambda: {"worker": 0.0, "node": 1.3e-5, "remote": 4e-5, "disk": 6e-5, "adapter": 1e-9}
    )

    def steps(self) -> tuple[float, ...]:
        """(p0, p1, p2, d0, d1, d2)."""
        return (
            self.prefill_step,
            self.prefill_token,
            self.prefill_attention,
            self.decode_step,
            self.decode_seq,
            self.decode_kv_token,
        )


# For small models on a core of a CPU.
CPU_PRIORS = CostPriors(
    prefill_step=1.5e-3,
    prefill_token=1e-4,
    prefill_attention=1e-8,
    decode_step=2e-3,
    decode_seq=3e-4,
    decode_kv_token=5e-7,
    fetch_latency={"worker": 0.0, "node": 5e-3, "remote": 15e-3, "disk": 10e-3, "adapter": 10e-3},
    fetch_token={"worker": 0.0, "node": 3e-6, "remote": 1e-5, "disk": 1e-5, "adapter": 2e-9},
)


class CostModel(StepModel):
    """Predictions for one model on one kind of worker; seconds throughout."""

    def __init__(self, priors: CostPriors | None = None) -> None:
        self.priors = priors or CostPriors()
        self._fetched = set[Tier]()  # tiers of which a fetch was measured
        self._told = set[str]()  # workers that have said what fetches cost
        self._due = 0.0  # steps to be taken in of those that were told
        super().__init__(self.priors.steps())
        self._transfers = {
            tier: Transfer(
                latency,
                1.0 / max(self.priors.fetch_token[tier], 1e-12),
                large=LARGE_BYTES if tier == "adapter" else LARGE_TOKENS,
            )
            for tier, latency in self.priors.fetch_latency.items()
        }
        # The router asks several times a decision: seconds of any fetch, and of each token.
        self._fetch = dict(self.priors.fetch_latency), dict(self.priors.fetch_token)

    def fetch_seconds(self, tier: Tier, tokens: float) -> float:
        latency, token = self._fetch
        return latency[tier] + tokens * token[tier] if tokens > 0 else 0.0

    def latency(self, tier: Tier) -> float:
        """Until the first byte of a fetch."""
        return self._fetch[0][tier]

    def transfer_seconds(self, tier: Tier, tokens: float) -> float:
        """How long a fetch takes the link."""
        return tokens * self._fetch[1][tier]

    def fetch_pays(self, tier: Tier, tokens: int, context: int = 0, behind: float = 0.0, slow: float = 1.0) -> bool:
        """Whether taking ``tokens`` from a tier is predicted cheaper than computing them. ``behind``: seconds that the
        fetch waits for its link longer than the worker is busy anyway, negative for shorter. ``slow``: the worker's
        factor for prompts.
        """
        computed = tokens * (self.p1 + self.p2 * (context + tokens * 0.5)) * slow
        return behind + self.fetch_seconds(tier, tokens) < computed

    def expect(self, tiers: Sequence[TierCost], worker: str) -> None:
        """What a worker takes fetches to cost, by its machine. Its first word counts, as one of all workers', until a
        fetch has been measured; where it names no latency, which is a guess as well, the prior stays.
        """
        if worker in self._told or not tiers:
            return
        self._told.add(worker)
        for one in tiers:
            if one.tier not in self._transfers or one.tier in self._fetched or one.token <= 0:
                continue
            large = LARGE_BYTES if one.tier == "adapter" else LARGE_TOKENS
            latencies, tokens = self._fetch
            share = 1.0 / len(self._told)
            latency = latencies[one.tier] + share * (one.latency - latencies[one.tier]) if one.latency else 0.0
            latencies[one.tier] = latency or latencies[one.tier]
            tokens[one.tier] += share * (one.token - tokens[one.tier])
            self._transfers[one.tier] = Transfer(latencies[one.tier], 1.0 / tokens[one.tier], large=large)

    def take(self, steps: Sequence[StepSample], fetches: Sequence[FetchSample], worker: str) -> None:
        """What a worker reports that it has measured."""
        # A few hundred steps a second are enough for six numbers, however many workers there are.
        self._due += len(steps) * min(1.0, MEASURED_WORKERS / max(self.workers, 1))
        taken = min(int(self._due), len(steps))
        self._due -= taken
        self.observe(steps[len(steps) - taken :], worker)
        for fetch in fetches:
            transfer = self._transfers.get(fetch.tier)
            if transfer is not None and fetch.tokens > 0 and fetch.seconds > 0:
                self._fetched.add(fetch.tier)
                transfer.add(fetch.tokens, fetch.seconds)
                latency, token = self._fetch
                latency[fetch.tier], token[fetch.tier] = transfer.latency_s, 1.0 / transfer.per_s
