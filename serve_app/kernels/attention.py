"""Paged attention over the engine's block cache: C++ on CPUs, Triton on GPUs, and plain torch for all else.

All share one signature and one meaning. Query i of a request with q queries stands at position
``p = seq_len - q + i`` and attends to keys ``max(0, p - window + 1) .. p`` of its own request::

    score(k)  = scale * q.k, with a soft cap: softcap * tanh(scale * q.k / softcap)
    weight(k) = exp(score(k)) / (exp(sink) + sum of exp(score) over the keys)        without a sink: exp(sink) = 0
    out       = sum of weight(k) * v(k) over the keys

The sink is one logit per head that takes part in the softmax and has no value: the weights of the keys sum up to less
than 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from serve_app.kernels.batch import AttentionBatch
from serve_app.kernels.library import native
from serve_app.kernels.library.load import cpu_library
from serve_app.kernels.reference.attention import paged_attention_torch, write_kv_torch
from serve_app.kernels.shapes import check_queries, check_rows

if TYPE_CHECKING:
    from serve_app.kernels.operators import Operators


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T query tokens over the cached keys of their requests.

    ``q`` [T, Hq, D] (any strides); ``kv_layer`` [2, num_blocks, Hkv, 32, D], K/V of the batch already
    written, or [1, ...] where keys are their own values; ``sinks`` [Hq] extra logits per head; Hq a multiple of
    Hkv. Returns a contiguous [T, Hq, D] of q's dtype. Raises ValueError when lengths or block ids contradict the
    cache (C++ path),
    :class:`~serve_app.kernels.shapes.ShapeMismatch` where heads or head sizes do.
    """
    check_queries(q, kv_layer, batch, sinks)
    if not q.is_cuda and native.attention_supports(q, kv_layer):
        library = cpu_library()
        if library is not None:
            return native.attention(
                library, q, kv_layer, batch.query_start, batch.seq_lens, batch.block_tables,
                scale, window, softcap, sinks,
            )  # fmt: skip
    if q.is_cuda:
        return _gpu(q).attention(q, kv_layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return paged_attention_torch(q, kv_layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Writes ``k``, ``v`` [T, Hkv, D] to ``slots`` [T] int64 (block * 32 + offset) of ``kv_layer``, in place; where
    values are the first columns of keys, ``k`` alone.
    """
    if len(kv_layer) == 1:
        check_rows(kv_layer, k, k, slots)
        write_kv_torch(kv_layer, k, k, slots)
        return
    check_rows(kv_layer, k, v, slots)
    if not k.is_cuda and native.write_supports(kv_layer, k, v):
        library = cpu_library()
        if library is not None:
            native.write_kv(library, kv_layer, k, v, slots)
            return
    (_gpu(k).write_kv if k.is_cuda else write_kv_torch)(kv_layer, k, v, slots)


def _gpu(tensor: Tensor) -> Operators:
    from serve_app.kernels.gpu.backend import operators

    return operators(tensor.device)
