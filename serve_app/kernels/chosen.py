"""Attention to chosen keys: each query attends to those that were picked for it, and to no others.

DeepSeek sparse attention (DeepSeek-V3.2-Exp, section 2.1) picks tokens, DeepSeek-V4's (section 2.3) entries that stand
for several tokens, beside the tokens of a window. ``out = sum of weight(k) * v(k)`` as in
:mod:`serve_app.kernels.attention`, over the keys that were picked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.kernels.batch import BLOCK, AttentionBatch
from serve_app.kernels.shapes import check_queries

# Bytes of keys and values that are gathered at once.
GATHERED = 64 << 20


@dataclass(slots=True, frozen=True)
class Source:
    """Keys and values [blocks, slots of each, Hkv, D], which may be the same tensor, and which of them rows attend to.
    ``pick`` gives of some rows [n] the slots [n, count] int64, counted through all blocks, and which of these there
    are.
    """

    keys: Tensor
    values: Tensor
    count: int
    pick: Callable[[slice], tuple[Tensor, Tensor]]


def attend(
    q: Tensor, sources: Sequence[Source], *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Queries [T, Hq, D] over what is picked of all ``sources`` together: [T, Hq, D] of q's dtype."""
    rows, _, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    each = sum(source.count * source.keys.shape[2] for source in sources) * dim * 2 * max(4, q.dtype.itemsize)
    step = max(1, GATHERED // max(1, each))
    for first in range(0, rows, step):
        part = slice(first, min(rows, first + step))
        keys, values, seen = [], [], []
        for source in sources:
            slots, there = source.pick(part)
            slots = slots.masked_fill(~there, 0)
            found = gathered(source.keys, slots)
            keys.append(found)
            values.append(found if source.values is source.keys else gathered(source.values, slots))
            seen.append(there)
        out[part] = _attend(
            q[part], torch.cat(keys, 1), torch.cat(values, 1), torch.cat(seen, 1), scale, softcap, sinks
        )
    return out


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
    """``chosen`` [T, K] int32: positions in the query's own text, in any order, each at most once; -1 for none. Those
    behind the query's own are left out. The rest as in :func:`serve_app.kernels.attention.paged_attention`.
    """
    check_queries(q, kv_layer, batch, sinks)
    request, position = rows_of(batch, len(q), q.device)

    def pick(part: slice) -> tuple[Tensor, Tensor]:
        keys = chosen[part].long()
        seen = (keys >= 0) & (keys <= position[part, None])
        return slots_of(batch.block_tables, request[part], keys.masked_fill(~seen, 0)), seen

    return attend(q, [layer_source(kv_layer, chosen.shape[1], pick)], scale=scale, softcap=softcap, sinks=sinks)


def window_source(kv_layer: Tensor, batch: AttentionBatch, window: int, request: Tensor, position: Tensor) -> Source:
    """The last ``window`` tokens of each row, itself among them; ``request`` and ``position`` as :func:`rows_of`."""

    def pick(part: slice) -> tuple[Tensor, Tensor]:
        keys = position[part, None] - torch.arange(window, device=position.device)
        seen = keys >= 0
        return slots_of(batch.block_tables, request[part], keys.clamp_min(0)), seen

    return layer_source(kv_layer, window, pick)


def layer_source(kv_layer: Tensor, count: int, pick: Callable[[slice], tuple[Tensor, Tensor]]) -> Source:
    """Of a layer of the cache, [2, blocks, Hkv, 32, D], or [1, ...] where keys are their own values."""
    keys = kv_layer[0].transpose(1, 2)
    return Source(keys, keys if len(kv_layer) == 1 else kv_layer[1].transpose(1, 2), count, pick)


def slots_of(tables: Tensor, request: Tensor, positions: Tensor) -> Tensor:
    """Slots (block * 32 + offset) of ``positions`` [n, K] in the texts of rows' ``request`` [n]."""
    return tables[request[:, None], positions // BLOCK].long() * BLOCK + positions % BLOCK


def rows_of(batch: AttentionBatch, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each row's request and position, int64 [T]."""
    row = torch.arange(rows, device=device)
    borders = batch.query_start.long()
    request = torch.searchsorted(borders[1:].contiguous(), row, right=True)
    return request, batch.seq_lens.long()[request] - borders[request + 1] + row


def gathered(side: Tensor, slots: Tensor) -> Tensor:
    """[n, K, Hkv, D] of [blocks, slots of each, Hkv, D]."""
    narrow = side.dtype == torch.float8_e4m3fn  # of which torch gathers none
    held = side.view(torch.uint8) if narrow else side
    found = held[slots // side.shape[1], slots % side.shape[1]]
    return found.view(side.dtype) if narrow else found


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
    # Slots that were not picked may hold anything, NaN included, and 0 * NaN is NaN.
    values = values.to(q.dtype).masked_fill(~seen[:, :, None, None], 0)
    return torch.matmul(weights.to(q.dtype), values.transpose(1, 2)).view(rows, q_heads, dim)
