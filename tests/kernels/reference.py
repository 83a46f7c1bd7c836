"""Attention in the most literal form: one query, one head and one request at a time, float64, dense
softmax."""

import torch
from torch import Tensor

from serve_app.kernels.library.selftest import RandomBatch


def naive_attention(
    b: RandomBatch, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    out = torch.zeros(b.q.shape, dtype=torch.float64)
    q_heads, kv_heads = b.q.shape[1], b.kv_layer.shape[2]
    for r in range(len(b.seq_lens)):
        begin, end, length = int(b.query_start[r]), int(b.query_start[r + 1]), int(b.seq_lens[r])
        where = [(int(b.block_tables[r, p // 32]), p % 32) for p in range(length)]
        keys = torch.stack([b.kv_layer[0, block, :, offset] for block, offset in where]).double()
        values = torch.stack([b.kv_layer[1, block, :, offset] for block, offset in where]).double()
        for row in range(begin, end):
            position = length - (end - begin) + row - begin
            low = 0 if window is None else max(0, position - window + 1)
            for h in range(q_heads):
                kv = h // (q_heads // kv_heads)
                scores = keys[low : position + 1, kv] @ b.q[row, h].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h].double().view(1)])
                weights = scores.softmax(0)[: position + 1 - low]
                out[row, h] = weights @ values[low : position + 1, kv]
    return out
