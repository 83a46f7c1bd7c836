"""Attention within chunks of a fixed number of positions, as Llama 4's layers with rotation have it.

A query at position p sees keys ``p // chunk * chunk .. p``. So each request falls into pieces, one for each chunk that
its queries lie in, and each piece is a request of its own whose first block is the chunk's first::

    chunk 64, queries at 60..130 of one request    ->    60..63 | 64..127 | 128..130
    keys that they see                                    0..63    64..127   128..130
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.attention import paged_attention
from serve_app.kernels.batch import BLOCK


@dataclass(slots=True)
class Pieces:
    """What attention needs of a batch (:class:`serve_app.kernels.batch.AttentionBatch`), with a row for each
    piece."""

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int
    total_seq_len: int
    decodes: int = 0


def cut(batch: Any, chunk: int) -> tuple[Pieces, list[int]]:
    """The pieces of ``batch``, and for each the tokens before its first chunk that its first block still holds (0 where
    chunks begin with blocks)."""
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    borders, seq_lens, before, rows, firsts = [0], [], [], [], []
    for request, length in enumerate(lengths):
        at = length - (starts[request + 1] - starts[request])
        while at < length:
            first = at // chunk * chunk
            end = min(length, first + chunk)
            block = first // BLOCK
            borders.append(borders[-1] + end - at)
            seq_lens.append(end - block * BLOCK)
            before.append(first - block * BLOCK)
            rows.append(request)
            firsts.append(block)
            at = end
    device, tables = batch.block_tables.device, batch.block_tables
    columns = max(-(-n // BLOCK) for n in seq_lens)
    index = torch.tensor(firsts, device=device)[:, None] + torch.arange(columns, device=device)
    cut_tables = tables[torch.tensor(rows, device=device)].gather(1, index.clamp_max(tables.shape[1] - 1))
    counts = [b - a for a, b in zip(borders, borders[1:], strict=False)]
    pieces = Pieces(
        query_start=torch.tensor(borders, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=cut_tables.contiguous(),
        max_query_len=max(counts),
        max_seq_len=max(seq_lens),
        total_seq_len=sum(seq_lens),
    )
    return pieces, before


def chunked_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: Any,
    chunk: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`serve_app.kernels.attention.paged_attention` for keys of the queries' own chunks only."""
    pieces, before = cut(batch, chunk)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if not any(before):
        return paged_attention(q, kv_layer, pieces, window=window, **options)
    # Chunks that do not begin with blocks: a token at a time, its window is the way to the chunk's first position.
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    borders, lengths = pieces.query_start.tolist(), pieces.seq_lens.tolist()
    for piece, (length, skipped) in enumerate(zip(lengths, before, strict=True)):
        count = borders[piece + 1] - borders[piece]
        for row in range(count):
            seen = length - count + row + 1
            one = Pieces(
                query_start=pieces.query_start.new_tensor([0, 1]),
                seq_lens=pieces.seq_lens.new_tensor([seen]),
                block_tables=pieces.block_tables[piece : piece + 1],
                max_query_len=1,
                max_seq_len=seen,
                total_seq_len=seen,
            )
            at = slice(borders[piece] + row, borders[piece] + row + 1)
            own = min(seen - skipped, window or seen)
            out[at] = paged_attention(q[at], kv_layer, one, window=own, **options)
    return out
