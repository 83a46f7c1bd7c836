"""What is told of a prompt: its text, its tokens, and their log-probabilities by name."""

from __future__ import annotations

import numpy as np

from serve_app.api.types import GenerateRequest, PromptTokens, TokenLogprob
from serve_app.sampling_params import PromptLogprobs
from serve_app.text.tokenizer import Tokenizer


def prompt_tokens(
    tokenizer: Tokenizer, request: GenerateRequest, ids: np.ndarray, index: int, told: PromptLogprobs | None
) -> PromptTokens:
    """The event of choice ``index`` for a prompt of token ``ids`` [n] int32; ``told`` of all of them but the first."""
    listed = tuple(ids.tolist())
    whole = request.prompt if request.keep_tokens is None else None
    text = whole if whole is not None else tokenizer.decode(listed, skip_special_tokens=False)
    tokens = tuple(tokenizer.token_text(i) for i in listed)
    logprobs = None if told is None else [None, *_named(tokenizer, listed, told)]
    return PromptTokens(index, text, listed, tokens, logprobs)


def _named(tokenizer: Tokenizer, ids: tuple[int, ...], told: PromptLogprobs) -> list[TokenLogprob]:
    own = np.frombuffer(told.logprobs, np.float32)
    ranks = np.frombuffer(told.ranks, np.int32)
    top_ids = np.frombuffer(told.top_ids, np.int32).reshape(len(own), told.top)
    top = np.frombuffer(told.top_logprobs, np.float32).reshape(len(own), told.top)
    if len(own) != len(ids) - 1:
        raise ValueError(f"{len(own)} log-probabilities for a prompt of {len(ids)} tokens")
    name = tokenizer.token_text
    rows = zip(ids[1:], own.tolist(), ranks.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return [
        TokenLogprob(name(i), i, logprob, [(name(j), j, p) for j, p in zip(likeliest, values, strict=True)], rank)
        for i, logprob, rank, likeliest, values in rows
    ]
