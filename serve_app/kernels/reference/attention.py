"""Paged attention and the write to the cache in plain torch: for any device and dtype, and the kernels' truth."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.batch import BLOCK, AttentionBatch


def write_kv_torch(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """:func:`serve_app.kernels.attention.write_kv` in plain torch."""
    block, offset = slots // BLOCK, slots % BLOCK
    if kv_layer.dtype == torch.float8_e4m3fn:  # which has no infinity: what is too large would become NaN
        k, v = (t.float().clamp(-448, 448) for t in (k, v))
    kv_layer[0, block, :, offset] = k.to(kv_layer.dtype)
    if len(kv_layer) == 2:
        kv_layer[1, block, :, offset] = v.to(kv_layer.dtype)


def paged_attention_torch(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`serve_app.kernels.attention.paged_attention` in plain torch."""
    if kv_layer.dtype == torch.float8_e4m3fn:
        # Only the blocks that are read, since the whole cache in q's dtype would be twice as large.
        used, places = batch.block_tables.unique(return_inverse=True)
        narrow = kv_layer.view(torch.uint8)[:, used.long()].view(torch.float8_e4m3fn)
        batch = _Renumbered(batch, places.int())
        kv_layer = narrow.to(q.dtype)
    if batch.max_query_len == 1 and q.is_cuda:
        # One padded call: on a GPU launches cost more than the padding does.
        return _attend(q.unsqueeze(1), kv_layer, batch.block_tables, batch.seq_lens, scale, window, softcap, sinks)[
            :, 0
        ]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        if rows.start == rows.stop:
            continue
        # Blocks that fell out of every query's window need not be gathered.
        skip = max(0, length - (rows.stop - rows.start) - window + 1) // BLOCK if window else 0
        table = batch.block_tables[r : r + 1, skip : math.ceil(length / BLOCK)]
        seq_len = batch.seq_lens[r : r + 1] - skip * BLOCK
        out[rows] = _attend(q[None, rows], kv_layer, table, seq_len, scale, window, softcap, sinks)[0]
    return out


class _Renumbered:
    """A batch whose blocks have other numbers."""

    def __init__(self, batch: AttentionBatch, block_tables: Tensor) -> None:
        self.query_start, self.seq_lens, self.block_tables = batch.query_start, batch.seq_lens, block_tables
        self.max_query_len, self.max_seq_len = batch.max_query_len, batch.max_seq_len
        self.total_seq_len, self.decodes = batch.total_seq_len, batch.decodes


def _attend(
    q: Tensor,
    kv_layer: Tensor,
    tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Dense attention of [B, Q, Hq, D] queries over the blocks of ``tables`` [B, n]; returns [B, Q, Hq, D].

    The query heads of a KV head are folded into the query length: one K/V read serves the group, which SDPA's
    own ``enable_gqa`` does not achieve on CPU.
    """
    requests, queries, q_heads, dim = q.shape
    kv_heads = kv_layer.shape[2]
    group = q_heads // kv_heads
    keys, values = (
        kv_layer[part][tables.long()].transpose(2, 3).reshape(requests, -1, kv_heads, dim).transpose(1, 2)
        for part in (0, -1)
    )
    if requests == 1 and queries == 1 and not (window or softcap or sinks is not None):
        # Plain decode sees all of its keys: no mask, which is what SDPA's fast kernels want.
        length = int(seq_lens[0])
        folded = q.reshape(1, kv_heads, group, dim)
        out = F.scaled_dot_product_attention(folded, keys[:, :, :length], values[:, :, :length], scale=scale)
        return out.reshape(1, 1, q_heads, dim)
    key = torch.arange(keys.shape[2], device=q.device)
    position = (seq_lens.long()[:, None] - queries + torch.arange(queries, device=q.device)).repeat_interleave(group, 1)
    seen = key <= position[:, :, None]
    if window:
        seen &= key > position[:, :, None] - window
    # Slots behind a request's end may hold anything, NaN included, and 0 * NaN is NaN.
    values = values.masked_fill((key >= seq_lens[:, None])[:, None, :, None], 0)
    folded = (
        q.reshape(requests, queries, kv_heads, group, dim)
        .transpose(1, 2)
        .reshape(requests, kv_heads, queries * group, dim)
    )
    if softcap or sinks is not None:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (folded.to(wide) @ keys.to(wide).transpose(2, 3)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        if sinks is not None:
            sink = sinks.to(wide).view(1, kv_heads, 1, group).expand(requests, -1, queries, -1)
            scores = torch.cat([scores, sink.reshape(requests, kv_heads, -1, 1)], dim=-1)
        out = scores.softmax(-1)[..., : key.shape[0]].to(q.dtype) @ values
    else:
        keys = keys.masked_fill((key >= seq_lens[:, None])[:, None, :, None], 0)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen[:, None], scale=scale)
    return out.view(requests, kv_heads, queries, group, dim).transpose(1, 2).reshape(requests, queries, q_heads, dim)
