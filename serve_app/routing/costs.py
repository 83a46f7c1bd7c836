"""What work costs on a worker of one model: seconds of prefill, of a decode step, of a fetch. Learned while serving.

A step's time is modelled as a sum over what it does (after DistServe's latency model, arXiv 2401.09670, appendix A):

    seconds = p0·[prefills] + p1·n + p2·n·(c + n/2)  +  d0·[decodes] + d1·b + d2·k

with n prompt tokens computed behind c tokens of context, and b sequences that decode with k tokens of context in all.
The six numbers start as priors and follow the measured steps through a Kalman filter on the relative error: recursive
least squares whose uncertainty grows a little with each sample, and never beyond that of the priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serve_app.routing.types import FetchSample, StepSample, Tier

# Regression sees features of about one: a step of 1,000 prompt tokens, 10 sequences, 10,000 tokens of context.
_SCALE = np.array([1.0, 1e3, 1e7, 1.0, 1e1, 1e5])
_DRIFT = 3e-3  # how far a number may wander between two samples, as a share of its prior
_FETCH_GAIN = 0.1


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
        default_factory=lambda: {"worker": 0.0, "node": 3e-3, "remote": 8e-3, "disk": 10e-3}
    )
    fetch_token: dict[Tier, float] = field(
        default_factory=lambda: {"worker": 0.0, "node": 1.3e-5, "remote": 4e-5, "disk": 6e-5}
    )

    def coefficients(self) -> NDArray[np.float64]:
        """(p0, p1, p2, d0, d1, d2)."""
        return np.array(
            [
                self.prefill_step,
                self.prefill_token,
                self.prefill_attention,
                self.decode_step,
                self.decode_seq,
                self.decode_kv_token,
            ]
        )


# For small models on a core of a CPU.
CPU_PRIORS = CostPriors(
    prefill_step=1.5e-3,
    prefill_token=1e-4,
    prefill_attention=1e-8,
    decode_step=2e-3,
    decode_seq=3e-4,
    decode_kv_token=5e-7,
    fetch_latency={"worker": 0.0, "node": 5e-3, "remote": 15e-3, "disk": 10e-3},
    fetch_token={"worker": 0.0, "node": 3e-6, "remote": 1e-5, "disk": 1e-5},
)


class CostModel:
    """Predictions for one model on one kind of worker; seconds throughout."""

    def __init__(self, priors: CostPriors | None = None) -> None:
        self.priors = priors or CostPriors()
        self.samples = 0
        self._theta = self.priors.coefficients() * _SCALE
        # How far the truth may be from the priors: a factor of about three, for each number by itself.
        self._prior_spread = 3.0 * np.abs(self._theta) + 1e-12
        self._spread = np.diag(self._prior_spread**2)
        self._drift = np.diag((_DRIFT * self._theta) ** 2)
        self._error = 0.05  # relative, smoothed: what the model leaves unexplained
        self._fetch_latency = dict(self.priors.fetch_latency)
        self._fetch_token = dict(self.priors.fetch_token)
        self._slow: dict[str, float] = {}
        self._unpack()

    # -- predictions -------------------------------------------------------------------------------------------

    def prefill_seconds(self, tokens: int, context: int = 0, chunk: int = 8192, beside: float = 0.0) -> float:
        """``tokens`` uncached ones behind ``context`` cached ones, ``chunk`` per step; ``beside`` seconds go to
        decoding in each of those steps.
        """
        steps = -(-tokens // chunk)
        return steps * (self.p0 + beside) + tokens * (self.p1 + self.p2 * (context + tokens * 0.5))

    def token_seconds(self, chunk: int = 8192, context: int = 2048, beside: float = 0.0) -> float:
        """One prompt token of a long queue, seconds."""
        return (self.p0 + beside) / chunk + self.p1 + self.p2 * context

    def decode_seconds(self, batch: float, kv_tokens: float) -> float:
        """One step of ``batch`` sequences that have ``kv_tokens`` of context in all."""
        return self.d0 + self.d1 * batch + self.d2 * kv_tokens

    def fetch_seconds(self, tier: Tier, tokens: float) -> float:
        return self._fetch_latency[tier] + tokens * self._fetch_token[tier] if tokens > 0 else 0.0

    def fetch_line(self, tier: Tier) -> tuple[float, float]:
        """Seconds of a fetch whatever its size, and seconds per token."""
        return self._fetch_latency[tier], self._fetch_token[tier]

    def fetch_pays(self, tier: Tier, tokens: int, context: int = 0) -> bool:
        """Whether taking ``tokens`` from a tier is predicted cheaper than computing them."""
        computed = tokens * (self.p1 + self.p2 * (context + tokens * 0.5))
        return self.fetch_seconds(tier, tokens) < float(computed)

    def slowness(self, worker: str) -> float:
        """A worker's step time over the model's prediction; 1.0 until something is known."""
        return self._slow.get(worker, 1.0)

    # -- learning ----------------------------------------------------------------------------------------------

    def observe(self, steps: Sequence[StepSample] = (), fetches: Sequence[FetchSample] = (), worker: str = "") -> None:
        """Takes in what a worker has measured. Samples that can't be true are ignored."""
        for step in steps:
            self._observe_step(step, worker)
        if steps:
            self._unpack()
        for fetch in fetches:
            if fetch.tokens > 0 and fetch.seconds > 0 and fetch.tier in self._fetch_token:
                rate = max(fetch.seconds - self._fetch_latency[fetch.tier], 0.05 * fetch.seconds) / fetch.tokens
                self._fetch_token[fetch.tier] += _FETCH_GAIN * (rate - self._fetch_token[fetch.tier])

    def forget(self, worker: str) -> None:
        self._slow.pop(worker, None)

    def _observe_step(self, step: StepSample, worker: str) -> None:
        n, c = step.prefill_tokens, step.context_tokens
        if not 1e-6 < step.seconds < 60.0 or (n <= 0 and step.decode_seqs <= 0):
            return
        decodes = step.decode_seqs > 0
        x = np.array([n > 0, n, n * (c + n * 0.5), decodes, step.decode_seqs, step.kv_tokens], np.float64) / _SCALE
        predicted = float(x @ self._theta)
        if worker and predicted > 0:
            ratio = min(4.0, max(0.25, step.seconds / predicted))
            self._slow[worker] = 0.98 * self._slow.get(worker, 1.0) + 0.02 * ratio
        # Relative error: x and y are divided by the measured time, so short decode steps weigh as much as long chunks.
        x = x / step.seconds
        innovation = 1.0 - float(x @ self._theta)
        if self.samples > 50 and abs(innovation) > 20 * self._error:
            return  # a hiccup of the machine, not a property of the model
        spread_x = self._spread @ x
        noise = self._error**2
        gain = spread_x / (noise + float(x @ spread_x))
        self._theta = self._theta + gain * innovation
        # Joseph's form: stays symmetric and positive whatever is rounded.
        keep = np.eye(6) - np.outer(gain, x)
        spread = keep @ self._spread @ keep.T + noise * np.outer(gain, gain) + self._drift
        shrink = np.minimum(1.0, self._prior_spread / np.sqrt(np.diag(spread)))
        self._spread = spread * np.outer(shrink, shrink)
        self._error = max(0.02, 0.99 * self._error + 0.01 * min(1.0, abs(innovation)))
        self.samples += 1

    def _unpack(self) -> None:
        values = np.maximum(self._theta / _SCALE, 0.0)
        self.p0, self.p1, self.p2, self.d0, self.d1, self.d2 = (float(v) for v in values)
        self.p1 = max(self.p1, 1e-8)
        self.d0 = max(self.d0, 1e-6)
