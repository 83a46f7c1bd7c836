"""How a request is sampled, and what is told of its tokens. Everything from the dialects to the engine speaks of it, so
it imports nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How one request turns logits into tokens.

    ``temperature == 0`` is greedy. ``seed`` together with the position of a token fixes the random number used for it,
    so that a request's output does not depend on what else is in the batch, on preemption, or on which worker continues
    it: exactly in float32; in bfloat16 up to the last bits of logits, which depend on how a prompt is cut into steps.
    """

    max_tokens: int = 256
    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float | None = None  # None: the model's own (`serve_app.engine.rules`), or none
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # No token that ends the answer is drawn before it has so many.
    min_tokens: int = 0
    # What the output must look like, in llguidance's Lark; compiled by `serve_app.grammar.matcher`.
    grammar: str | None = None
    # Log-probabilities of the prompt's own tokens are wanted, and of so many likeliest ones beside each.
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ValueError(f"{name} must be a finite number")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError("min_tokens must lie between 0 and max_tokens")
        if self.temperature < 0:
            raise ValueError("temperature must not be negative; 0 means greedy")

    def going_on(self, ends: Iterable[int]) -> SamplingParams:
        """The same for a token before ``min_tokens``: neither its stop tokens nor the model's ``ends`` are drawn."""
        forbidden = dict.fromkeys((*self.stop_token_ids, *ends), -math.inf)
        return replace(self, logit_bias={**(self.logit_bias or {}), **forbidden})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def repetition(self) -> float:
        """The penalty as a factor."""
        return 1.0 if self.repetition_penalty is None else self.repetition_penalty


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated token: its own, and those of the ``top`` most likely ones (natural log)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens 1 to n (natural log), each given those before it, with the ``top`` likeliest
    beside each, best first. Little-endian, row after row.
    """

    top: int
    logprobs: bytes  # float32 [n]
    ranks: bytes  # int32 [n], 1 for the likeliest
    top_ids: bytes  # int32 [n, top]
    top_logprobs: bytes  # float32 [n, top]
