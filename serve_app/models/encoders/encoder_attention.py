"""Attention of independent sequences in one flat batch: equal lengths share one call, and nothing is padded
or masked.

::

    tokens   a a a | b b b | c c c c c     runs = [(2, 3), (1, 5)]
             └─ one SDPA, batch 2 ─┘└ one, batch 1 ┘

The batch is sorted by length, so sequences of one length lie together and a view splits them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "serve_app_flat"
Runs = list[tuple[int, int]]  # (how many sequences, their length)


def length_runs(lengths: list[int]) -> Runs:
    """Neighbouring equal lengths, counted: [3, 3, 5] -> [(2, 3), (1, 5)]."""
    runs: Runs = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


def flat_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    runs: Runs,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D] -> [1, T, Hq, D]; what is behind the sum over
    ``runs`` comes out as zeros.

    Raises NotImplementedError for what it does not compute; the loader then keeps the padded path.
    """
    if sliding_window is not None or softcap is not None or s_aux is not None or attention_mask is not None:
        raise NotImplementedError("flat attention has no window, softcap, sinks or mask")
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    if key.shape[1] != query.shape[1]:
        # Expanding is faster than SDPA's own enable_gqa on CPU.
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    heads, dim = rows[0].shape[1:]
    out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    start = 0
    for count, length in runs:
        end = start + count * length
        q, k, v = (x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in rows)
        attended = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=causal)
        out[start:end].view(count, length, heads, dim).copy_(attended.transpose(1, 2))
        start = end
    out[start:] = 0
    return out.unsqueeze(0), None


def register() -> None:
    """Makes the function known to transformers under :data:`NAME`; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, flat_attention_forward)
