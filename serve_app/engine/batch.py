"""One step's work as tensors: the tokens of all scheduled requests laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.gpu.staging import to_device
from serve_app.engine.scheduler import Scheduled


@dataclass(slots=True)
class Capture:
    """A batch's wish for hidden states, which whoever runs the forward pass fulfils.

    ``layers`` are indices; wanted is what *enters* each layer (0: the embeddings). The forward sets ``states``
    [T, len(layers), hidden] in the model's dtype, on its device.
    """

    layers: tuple[int, ...]
    states: Tensor | None = None


@dataclass(slots=True)
class Batch:
    """T tokens of R requests, concatenated; passed as keyword ``batch=`` through the model to the attention function.

    ::

        tokens   | request 0: 3 prompt tokens | request 1: 1 | request 2: 1 + 2 drafts |
        rows       0          1          2      3              4     5     6
        query_start = [0, 3, 4, 7]      sample_rows = [2, 3, 4, 5, 6]

    Query i of a request with q queries stands at position ``seq_len - q + i``; the K/V of the batch's own tokens are
    written to ``slots`` before anything is attended to.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, block * 32 + offset
    query_start: Tensor  # [R+1] int32
    seq_lens: Tensor  # [R] int32
    block_tables: Tensor  # [R, max_blocks] int32
    sample_rows: Tensor  # [S] int64
    max_query_len: int
    max_seq_len: int
    kv: Tensor  # [L, 2, num_blocks, Hkv, 32, D]
    total_seq_len: int = 0  # sum of seq_lens; 0: the host does not know it
    decodes: int = 0  # at least so many requests at the head of the batch have one token
    capture: Capture | None = None


def build_batch(scheduled: Sequence[Scheduled], kv: Tensor) -> Batch:
    """Lays the scheduled tokens out as one :class:`Batch` on the device of ``kv``."""
    counts = np.array([s.count for s in scheduled], np.int64)
    starts = np.array([s.start for s in scheduled], np.int64)
    query_start = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])
    row = np.repeat(np.arange(len(scheduled)), counts)
    positions = np.arange(total, dtype=np.int64) - query_start[:-1].astype(np.int64)[row] + starts[row]

    tables = np.zeros((len(scheduled), max(len(s.blocks) for s in scheduled)), np.int32)
    input_ids = np.empty(total, np.int64)
    for index, s in enumerate(scheduled):
        tables[index, : len(s.blocks)] = s.blocks
        input_ids[query_start[index] : query_start[index + 1]] = s.token_ids()
    slots = tables[row, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
    sample_rows = np.concatenate(
        [np.arange(query_start[i + 1] - s.samples, query_start[i + 1]) for i, s in enumerate(scheduled)]
    )
    seq_lens = (starts + counts).astype(np.int32)

    arrays = [input_ids, positions, slots, query_start, seq_lens, tables, sample_rows.astype(np.int64)]
    ids, where, places, borders, lengths, blocks, rows = to_device(arrays, kv.device)
    return Batch(
        input_ids=ids,
        positions=where,
        slots=places,
        query_start=borders,
        seq_lens=lengths,
        block_tables=blocks,
        sample_rows=rows,
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
        total_seq_len=int(seq_lens.sum()),
        decodes=int((np.cumsum(counts > 1) == 0).sum()),
        kv=kv,
    )
