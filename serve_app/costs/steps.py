"""What an engine step costs: seconds as a function of what it computes, learned while serving.

A step's time is modelled as a sum over what it does (after DistServe's latency model, arXiv 2401.09670, appendix A)::

    seconds = p0·[prefills] + p1·n + p2·n·(c + n/2)  +  d0·[decodes] + d1·b + d2·k

with n prompt tokens computed behind c tokens of context, and b sequences that decode with k tokens of context in all.
The six numbers start as priors and follow the measured steps through a Kalman filter on the relative error: recursive
least squares whose uncertainty grows a little with each sample, and never beyond that of the priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Regression sees features of about one: a step of 1,000 prompt tokens, 10 sequences, 10,000 tokens of context.
_SCALE = np.array([1.0, 1e3, 1e7, 1.0, 1e1, 1e5])
_DRIFT = 3e-3  # how far a number may wander between two samples, as a share of its prior


@dataclass(slots=True, frozen=True)
class StepSample:
    """One engine step as measured: what it computed and how long it took."""

    prefill_tokens: int  # prompt tokens computed in this step
    context_tokens: int  # tokens already computed before them, summed over the step's prefilling requests
    decode_seqs: int  # sequences that generated
    kv_tokens: int  # tokens of context that the generating sequences attended to
    seconds: float


class StepModel:
    """Predictions for one model on one kind of worker; seconds throughout.

    ``p0`` to ``d2`` are the formula's numbers, as learned so far.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        """``priors``: p0, p1, p2, d0, d1, d2."""
        self.samples = 0
        self._theta = np.array(priors, np.float64) * _SCALE
        # How far the truth may be from the priors: a factor of about three, for each number by itself.
        self._prior_spread = 3.0 * np.abs(self._theta) + 1e-12
        self._spread = np.diag(self._prior_spread**2)
        self._drift = np.diag((_DRIFT * self._theta) ** 2)
        self._error = 0.05  # relative, smoothed: what the model leaves unexplained
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

    def chunk_seconds(self, tokens: int, context: int) -> float:
        """``tokens`` of one prompt behind ``context`` ones, in a step that computes prompts anyway."""
        return tokens * (self.p1 + self.p2 * (context + tokens * 0.5))

    def slowness(self, worker: str) -> float:
        """A worker's step times over the model's predictions; 1.0 until something is known. One number for prompts and
        decoding: a worker that decodes computes too few prompts to tell its speed with them by these alone.
        """
        return self._slow.get(worker, 1.0)

    @property
    def workers(self) -> int:
        """How many have been measured."""
        return len(self._slow)

    # -- learning ----------------------------------------------------------------------------------------------

    def observe(self, steps: Sequence[StepSample], worker: str = "") -> None:
        """Takes in what a worker has measured. Samples that can't be true are ignored."""
        for step in steps:
            self._observe(step, worker)
        if steps:
            self._unpack()

    def forget(self, worker: str) -> None:
        self._slow.pop(worker, None)

    def _observe(self, step: StepSample, worker: str) -> None:
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
