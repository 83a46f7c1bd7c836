"""What a row of logits is told, and its bias and penalties.

:func:`penalise` has all rows at once, on the device and without a word to the host: a row's last token may be unknown
there (:mod:`serve_app.engine.gpu.overlap`), is named -1 and taken on the device. :func:`penalise_row` gives the same
numbers row by row, which costs less on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.gpu.staging import to_device
from serve_app.sampling_params import SamplingParams


@dataclass(slots=True)
class SampleRow:
    """One row of logits: the settings, the position of the token to draw, and what came before where penalties need
    it. ``asked``: tokens whose log-probabilities are told instead of the likeliest ones'.
    """

    params: SamplingParams
    position: int
    prompt: list[int] | None = None
    output: list[int] | None = None
    asked: tuple[int, ...] = ()


def penalise(logits: Tensor, rows: list[SampleRow], last: Tensor | None = None) -> Tensor:
    """``logits`` [S, V] float32 after bias and penalties; ``last`` [S] int64 stands for tokens named -1."""
    penalised = [i for i, row in enumerate(rows) if row.params.has_penalties]
    if penalised:
        logits = _repeated(logits, rows, penalised, last)
    pairs = [
        (index, token, value)
        for index, row in enumerate(rows)
        for token, value in (row.params.logit_bias or {}).items()
        if 0 <= token < logits.shape[1]
    ]
    if not pairs:
        return logits
    at, tokens, values = (np.array(column) for column in zip(*pairs, strict=True))
    flat, bias = to_device([at * logits.shape[1] + tokens, values.astype(np.float32)], logits.device)
    return logits.flatten().scatter_add(0, flat, bias).view(logits.shape)


def _repeated(logits: Tensor, rows: list[SampleRow], penalised: list[int], last: Tensor | None) -> Tensor:
    texts = [(rows[i].prompt or [], rows[i].output or []) for i in penalised]
    lengths = np.array([len(prompt) + len(output) for prompt, output in texts])
    params = [row.params for row in rows]
    tokens, at, is_output, factor, frequency, presence = to_device(
        [
            np.concatenate([np.array(part, np.int64) for text in texts for part in text]),
            np.repeat(np.array(penalised, np.int64), lengths),
            np.concatenate([np.repeat([0.0, 1.0], [len(p), len(o)]) for p, o in texts]).astype(np.float32),
            np.array([[p.repetition] for p in params], np.float32),
            np.array([[p.frequency_penalty] for p in params], np.float32),
            np.array([[p.presence_penalty] for p in params], np.float32),
        ],
        logits.device,
    )
    if last is not None:
        tokens = torch.where(tokens < 0, last[at], tokens)
    flat = at * logits.shape[1] + tokens
    none = torch.zeros(logits.numel(), dtype=torch.float32, device=logits.device)
    seen = none.scatter(0, flat, 1.0).view(logits.shape) > 0
    counts = none.scatter_add(0, flat, is_output).view(logits.shape)
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - (counts * frequency + torch.where(counts > 0, presence, 0.0))


def penalise_row(logits: Tensor, row: SampleRow) -> None:
    """Applies bias and penalties to one row in place.

    Repetition counts prompt and output (CTRL, arXiv 1909.05858: divide positive, multiply negative logits); frequency
    and presence count the output only (OpenAI's definition: ``logit - count * frequency - (count > 0) * presence``).
    """
    params = row.params
    if params.has_penalties:
        output = torch.tensor(row.output or [], dtype=torch.int64, device=logits.device)
        if params.repetition != 1.0:
            seen = torch.tensor(
                (row.prompt or []) + (row.output or []), dtype=torch.int64, device=logits.device
            ).unique()
            values = logits[seen]
            factor = params.repetition
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if len(output) and (params.frequency_penalty or params.presence_penalty):
            ids, counts = output.unique(return_counts=True)
            logits[ids] -= counts * params.frequency_penalty + params.presence_penalty
    if params.logit_bias:
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < len(logits)}
        ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
        logits[ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
