"""Attention where the tokens of one picture see each other in both directions, as Gemma 3's do.

A query within such a span, which ends at ``e``, sees keys ``0 .. e - 1`` instead of ``0 .. p``; a sliding window still
ends the same way before ``p``. The scheduler never lets a step end inside a span, so all of these keys are there. Each
row of a span is a request of one query whose text ends where the span does; rows between spans stay together::

    text 0..9, picture 10..13, text 14..20, all in one step    ->    0..9 | 10 | 11 | 12 | 13 | 14..20
    keys that the last of each sees                                  0..9   0..13 each         0..20
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.attention import paged_attention
from serve_app.models.chunked import Pieces


def spanned_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`serve_app.kernels.attention.paged_attention` of a batch whose ``ends`` tells how many keys a row sees."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    starts, lengths, ends = batch.query_start.tolist(), batch.seq_lens.tolist(), batch.ends.tolist()
    # By the window that they are computed with: pieces of (request, first row, rows, keys).
    groups: dict[int | None, list[tuple[int, int, int, int]]] = {}
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        at = first
        while at < last:
            position = length - (last - at)
            if ends[at] == position + 1:
                end = next((r for r in range(at, last) if ends[r] != length - (last - r) + 1), last)
                groups.setdefault(window, []).append((request, at, end - at, length - (last - end)))
                at = end
                continue
            # Seen from the span's end the window is longer; where it reaches the text's beginning it is none.
            wide = None if window is None or position < window else window + ends[at] - 1 - position
            groups.setdefault(wide, []).append((request, at, 1, ends[at]))
            at += 1
    for wide, pieces in groups.items():
        rows = torch.tensor(_rows(pieces), device=q.device)
        found = paged_attention(q[rows], kv_layer, _batch_of(pieces, batch), window=wide, **options)
        out.index_copy_(0, rows, found)
    return out


def _rows(pieces: Iterable[tuple[int, int, int, int]]) -> list[int]:
    return [row for _, first, count, _ in pieces for row in range(first, first + count)]


def _batch_of(pieces: list[tuple[int, int, int, int]], batch: Any) -> Pieces:
    device = batch.block_tables.device
    borders, seen = [0], []
    for _, _, count, keys in pieces:
        borders.append(borders[-1] + count)
        seen.append(keys)
    requests = torch.tensor([request for request, _, _, _ in pieces], device=device)
    return Pieces(
        query_start=torch.tensor(borders, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seen, dtype=torch.int32, device=device),
        block_tables=batch.block_tables[requests].contiguous(),
        max_query_len=max(count for _, _, count, _ in pieces),
        max_seq_len=max(seen),
        total_seq_len=sum(seen),
    )
