"""Logits to tokens, for a batch in which every row has its own settings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.constrain import Mask
from serve_app.engine.gpu.staging import to_device
from serve_app.engine.penalties import SampleRow, penalise, penalise_row
from serve_app.sampling_params import TokenLogprobs

# Logits of which a GPU draws at once: what is computed in between takes seven times their bytes in float32.
AT_ONCE = 1 << 23
# Rows are cut to this many candidates first; those whose mass does not suffice for their top_p take the full path.
CANDIDATES = 64
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    """
    x = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> 11) / (1 << 53)


def sample(
    logits: Tensor, rows: list[SampleRow], mask: Mask | None = None
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Draws one token per row of ``logits`` [S, V] (any float dtype); log-probabilities for the rows that ask.

    Order as in the field: bias and penalties on the logits, then ``mask``, which no bias overrules, then temperature,
    top_k, top_p, min_p. Log-probabilities are those of the model, before any of it. ``logits`` may be changed.
    """
    logits = logits.float()
    wants_logprobs = [r.params.logprobs is not None for r in rows]
    raw = torch.log_softmax(logits, -1) if any(wants_logprobs) else None
    penalised = any(r.params.has_penalties or r.params.logit_bias for r in rows)
    if penalised and logits.is_cuda:
        for part in parts_of(logits):
            logits[part] = penalise(logits[part], rows[part])
    elif penalised:
        logits = logits.clone()
        for index, row in enumerate(rows):
            penalise_row(logits[index], row)
    if mask is not None:
        mask.apply(logits)
    parts = parts_of(logits) if logits.is_cuda else [slice(None)]
    token_ids = torch.cat([choose(logits[part], rows[part]) for part in parts]).tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    if raw is not None:
        for index, row in enumerate(rows):
            if wants_logprobs[index]:
                logprobs[index] = _token_logprobs(raw[index], token_ids[index], row.params.logprobs or 0, row.asked)
    return token_ids, logprobs


def draw_tokens(logits: Tensor, rows: list[SampleRow], last: Tensor | None = None) -> Tensor:
    """As :func:`sample` without masks and log-probabilities, and without a word to the host: int64 [S] on the device;
    ``last``: see :func:`~serve_app.engine.penalties.penalise`.
    """
    if all(row.params.greedy and not row.params.has_penalties and not row.params.logit_bias for row in rows):
        return logits.argmax(-1)
    found = []
    for part in parts_of(logits):
        penalised = penalise(logits[part].float(), rows[part], None if last is None else last[part])
        found.append(choose(penalised, rows[part]))
    return torch.cat(found)


def parts_of(logits: Tensor) -> list[slice]:
    """Rows of ``logits`` [S, V], :data:`AT_ONCE` numbers at a time."""
    step = max(1, AT_ONCE // logits.shape[1])
    return [slice(first, first + step) for first in range(0, len(logits), step)]


def choose(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """The best token of greedy rows and a drawn one of the others, int64 [S]; ``logits`` [S, V] float32."""
    drawn = [i for i, r in enumerate(rows) if not r.params.greedy]
    if len(drawn) == len(rows):
        return draw(logits, rows)
    tokens = logits.argmax(-1)
    if drawn:
        [index] = to_device([np.array(drawn, np.int64)], logits.device)
        tokens[index] = draw(logits[index], [rows[i] for i in drawn])
    return tokens


def draw(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Samples rows of ``logits`` [S, V] float32 by inverse transform of one uniform number per row; int64 [S]."""
    vocab = logits.shape[1]
    every = [r.params for r in rows]
    is_plain = [p.top_k <= 0 and p.top_p >= 1.0 and p.min_p <= 0.0 for p in every]
    points, temperature, top_p, min_p, top_k, plain, cut = (
        t.unsqueeze(1)
        for t in to_device(
            [
                np.array([uniform(r.params.seed, r.position) for r in rows], np.float64),
                np.array([max(p.temperature, 1e-30) for p in every], np.float32),
                np.array([p.top_p for p in every], np.float32),
                np.array([p.min_p for p in every], np.float32),
                np.array([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in every], np.int64),
                np.array([i for i, found in enumerate(is_plain) if found], np.int64),
                np.array([i for i, found in enumerate(is_plain) if not found], np.int64),
            ],
            logits.device,
        )
    )
    # Less the best first: neither a tiny temperature nor huge logits may overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    plain, cut = plain.squeeze(1), cut.squeeze(1)
    result = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if len(plain):
        result[plain] = _invert(torch.softmax(logits[plain], -1), points[plain])
    if len(cut):
        logits, points, top_k, top_p, min_p = logits[cut], points[cut], top_k[cut], top_p[cut], min_p[cut]
        probs = torch.softmax(logits, -1)
        best, indices = probs.topk(min(vocab, CANDIDATES), dim=-1)
        chosen = indices.gather(1, _invert(_truncate(best, top_k, top_p, min_p), points).unsqueeze(1)).squeeze(1)
        # Which path a row takes follows from the row alone: the two may order equal logits differently.
        enough = (best.sum(-1, keepdim=True) >= top_p) | (best[:, -1:] < min_p * best[:, :1])
        held = ((top_k <= CANDIDATES) | (top_k == vocab) & enough).squeeze(1)
        if vocab > CANDIDATES:
            _draw_from_all(probs, held, chosen, top_k, top_p, min_p, points)
        result[cut] = chosen
    return result


def _draw_from_all(
    probs: Tensor, held: Tensor, chosen: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, points: Tensor
) -> None:  # fmt: skip
    """Overwrites ``chosen`` [S] in the rows that are not ``held`` [S]: their first candidates were too few."""
    if probs.is_cuda:
        from serve_app.kernels.gpu.backend import operators

        if (draw_truncated := operators(probs.device).draw_truncated) is not None:
            draw_truncated(probs, held, chosen, top_k, top_p, min_p, points)
            return
    full = (~held).nonzero().squeeze(1)
    if len(full):
        ordered, indices = probs[full].sort(dim=-1, descending=True)
        index = _invert(_truncate(ordered, top_k[full], top_p[full], min_p[full]), points[full])
        chosen[full] = indices.gather(1, index.unsqueeze(1)).squeeze(1)


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zeroes what top_k, top_p and min_p exclude. ``probs`` [S, W] descends; at least the first survives."""
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = torch.where(rank < top_k, probs, 0.0)
    # Without top_k the mass is 1, however many candidates are at hand.
    kept = kept / torch.where(top_k > probs.shape[1], 1.0, kept.sum(-1, keepdim=True))
    before = kept.cumsum(-1) - kept
    return torch.where((rank == 0) | (before < top_p) & (kept >= min_p * kept[:, :1]), kept, 0.0)


def _invert(probs: Tensor, points: Tensor) -> Tensor:
    """The index at which the cumulative sum of each row of ``probs`` [S, W] passes ``points`` [S, 1]."""
    cumulative = probs.double().cumsum(-1)
    index = torch.searchsorted(cumulative, points.double() * cumulative[:, -1:], right=True).squeeze(1)
    # Rounding may leave the point at the very end: fall back to the last token that has any probability.
    last = probs.shape[1] - 1 - (probs > 0).flip(-1).int().argmax(-1)
    return torch.minimum(index, last)


def _token_logprobs(raw: Tensor, token: int, top: int, asked: tuple[int, ...]) -> TokenLogprobs:
    best: list[tuple[int, float]] = []
    if asked:
        best = list(zip(asked, raw[list(asked)].tolist(), strict=True))
    elif top:
        values, indices = raw.topk(min(top, raw.shape[0]))
        best = list(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(raw[token]), best)
