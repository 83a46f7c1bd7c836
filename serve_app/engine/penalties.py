"""Bias and penalties of all rows at once, on the device and without a word to the host.

The same numbers as ``sampling.penalise_row``, which costs less on a CPU. A row's last token may be unknown to the host
(:mod:`serve_app.engine.gpu.overlap`): it is named -1 and taken on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.gpu.staging import to_device
from serve_app.engine.sampling import SampleRow


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
