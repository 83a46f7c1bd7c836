"""Attention to chosen keys: each query attends to those that an indexer has picked for it, and to no others.

DeepSeek sparse attention (DeepSeek-V3.2-Exp, section 2.1): ``out = sum of weight(k) * v(k)`` as in
:mod:`serve_app.kernels.attention`, over the keys of ``chosen`` that are not behind the query's own position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serve_app.kernels.batch import BLOCK, AttentionBatch
from serve_app.kernels.shapes import check_queries

# Bytes of keys and values that are gathered at once.
GATHERED = 64 << 20


def chosen_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    chosen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``chosen`` [T, K] int32: positions in the query's own text, in any order, each at most once; -1 for none. The
    rest as in :func:`serve_app.kernels.attention.paged_attention`. Returns [T, Hq, D] of q's dtype.
    """
    check_queries(q, kv_layer, batch, sinks)
    rows, q_heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    out = torch.empty((rows, q_heads, dim), dtype=q.dtype, device=q.device)
    request, position = rows_of(batch, rows, q.device)
    each = chosen.shape[1] * kv_heads * dim * len(kv_layer) * max(4, q.dtype.itemsize)
    step = max(1, GATHERED // max(1, each))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        keys = chosen[part].long()
        seen = (keys >= 0) & (keys <= position[part, None])
        keys = keys.masked_fill(~seen, 0)
        block = batch.block_tables[request[part, None], keys // BLOCK].long()
        found = [_raw(side)[block, :, keys % BLOCK] for side in kv_layer]  # [rows, K, Hkv, D] each
        if kv_layer.dtype == torch.float8_e4m3fn:
            found = [side.view(torch.float8_e4m3fn) for side in found]
        out[part] = _attend(q[part], found[0], found[-1], seen, scale, softcap, sinks)
    return out


def rows_of(batch: AttentionBatch, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each row's request and position, int64 [T]."""
    row = torch.arange(rows, device=device)
    borders = batch.query_start.long()
    request = torch.searchsorted(borders[1:].contiguous(), row, right=True)
    return request, batch.seq_lens.long()[request] - borders[request + 1] + row


def _raw(side: Tensor) -> Tensor:
    # torch gathers no float8.
    return side.view(torch.uint8) if side.dtype == torch.float8_e4m3fn else side


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[rows, Hq, D] over [rows, K, Hkv, D]; ``seen`` [rows, K]."""
    rows, q_heads, dim = q.shape
    kv_heads = keys.shape[2]
    folded = q.view(rows, kv_heads, q_heads // kv_heads, dim)
    scores = torch.matmul(folded, keys.to(q.dtype).permute(0, 2, 3, 1)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    # Slots that nobody has chosen may hold anything, NaN included, and 0 * NaN is NaN.
    values = values.to(q.dtype).masked_fill(~seen[:, :, None, None], 0)
    return torch.matmul(weights.to(q.dtype), values.transpose(1, 2)).view(rows, q_heads, dim)
