"""What a model's folder asks of each of its answers, as transformers' ``generate`` follows its generation config.

What holds for a whole answer is resolved once, when its request comes. What depends on the text so far is a bias on one
row's logits. A grammar goes before all bans: a format that repeats itself could not be written otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from serve_app.engine.request import Request
from serve_app.sampling_params import SamplingParams

# Above every logit, and so large that what is added to it vanishes: of several forced tokens the first one wins.
_FORCED = 1e30


@dataclass(slots=True, frozen=True)
class Rules:
    """Fields of ``generation_config.json`` that change which token is the best; the defaults change nothing.

    ``min_length`` counts the prompt. Of ``bad_words``, each one a sequence of tokens, the last token is never drawn
    behind the others. ``no_repeat_ngram_size``: no n tokens stand twice in prompt and answer; with ``encoder_``, none
    of the answer stands in the prompt. ``forced_bos`` follows a prompt of one token, and one of ``forced_eos`` ends an
    answer that has all its tokens.
    """

    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    min_length: int = 0
    suppress: frozenset[int] = frozenset()
    begin_suppress: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    forced_bos: int | None = None
    forced_eos: frozenset[int] = frozenset()

    @property
    def read_text(self) -> bool:
        """Whether any of them depends on the tokens so far."""
        ngrams = self.no_repeat_ngram_size or self.encoder_no_repeat_ngram_size
        forced = self.forced_bos is not None or self.forced_eos
        return bool(ngrams or forced or self.begin_suppress or any(len(word) > 1 for word in self.bad_words))

    def rule(self, request: Request) -> None:
        """Resolves what holds for the whole answer of ``request``, which the engine is about to take."""
        sampling, given = request.sampling, request.sampling.repetition_penalty
        penalty = self.repetition_penalty if given is None else given
        if sampling.grammar is not None:
            request.sampling = replace(sampling, repetition_penalty=penalty)
            return
        least = max(sampling.min_tokens, self.min_new_tokens, self.min_length - request.prompt_len)
        never = dict.fromkeys([*self.suppress, *(word[0] for word in self.bad_words if len(word) == 1)], -math.inf)
        request.sampling = replace(
            sampling,
            repetition_penalty=penalty,
            min_tokens=min(least, sampling.max_tokens),
            logit_bias={**(sampling.logit_bias or {}), **never} or None,
        )
        request.rules = self if self.read_text else None

    def on_row(self, params: SamplingParams, tokens: list[int], prompt_len: int) -> SamplingParams:
        """``params`` for the token that follows ``tokens``, which begin with the prompt."""
        if forced := self._forced(len(tokens), prompt_len, params.max_tokens):
            return replace(params, logit_bias=dict.fromkeys(forced, _FORCED))
        banned = self._banned(tokens, prompt_len)
        if not banned:
            return params
        return replace(params, logit_bias={**(params.logit_bias or {}), **dict.fromkeys(banned, -math.inf)})

    def _forced(self, length: int, prompt_len: int, max_tokens: int) -> frozenset[int]:
        if length - prompt_len == max_tokens - 1 and self.forced_eos:
            return self.forced_eos - self.suppress
        if length == 1 and self.forced_bos is not None:
            return frozenset([self.forced_bos]) - self.suppress
        return frozenset()

    def _banned(self, tokens: list[int], prompt_len: int) -> set[int]:
        banned = set()
        for *before, last in self.bad_words:
            if before and tokens[-len(before) :] == before:
                banned.add(last)
        if self.begin_suppress and len(tokens) == prompt_len + (prompt_len == 1 and self.forced_bos is not None):
            banned |= self.begin_suppress
        if self.no_repeat_ngram_size:
            banned |= _followers(tokens, tokens, self.no_repeat_ngram_size)
        if self.encoder_no_repeat_ngram_size:
            banned |= _followers(tokens[:prompt_len], tokens, self.encoder_no_repeat_ngram_size)
        return banned


def _followers(text: list[int], tokens: list[int], size: int) -> set[int]:
    """Tokens that would make the last of ``tokens`` an n-gram of ``size`` that ``text`` has."""
    starts = len(text) - size + 1
    if starts <= 0 or len(tokens) < size - 1:
        return set()
    known = np.array(text)
    same = np.ones(starts, bool)
    for offset, token in enumerate(tokens[len(tokens) - size + 1 :]):
        same &= known[offset : offset + starts] == token
    return set(known[size - 1 :][same].tolist())
