"""Random-data checks that the compiled kernels must pass in every process before they are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.kernels.batch import BLOCK
from serve_app.kernels.library import native
from serve_app.kernels.reference.attention import paged_attention_torch, write_kv_torch

# Per dtype, on values of about unit size: bfloat16 keeps 8 bits, and both sides round the weights.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@dataclass(slots=True)
class RandomBatch:
    """A random paged batch: some requests decode, some prefill a chunk; unused cache slots hold NaN."""

    q: Tensor
    kv_layer: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    max_query_len: int
    max_seq_len: int
    total_seq_len: int
    decodes: int


def random_batch(
    queries: list[int],
    contexts: list[int],
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
) -> RandomBatch:
    """``queries[r]`` new tokens on top of ``contexts[r]`` cached ones; blocks are shuffled, K/V of all tokens
    set."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    counts = [-(-n // BLOCK) for n in lengths]
    ids = (torch.randperm(sum(counts) + 2, generator=generator) + 1).int()  # block 0 belongs to nobody
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    kv = torch.full((2, int(ids.max()) + 1, kv_heads, BLOCK, dim), float("nan"), dtype=dtype)
    slots, taken = [], 0
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[r, :count] = ids[taken : taken + count]
        taken += count
        position = torch.arange(length)
        where = tables[r].long()[position // BLOCK] * BLOCK + position % BLOCK
        rows = torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype)
        write_kv_torch(kv, rows[0], rows[1], where)
        slots.append(where[length - queries[r] :])
    start = torch.tensor([0, *queries]).cumsum(0).int()
    q = torch.randn(int(start[-1]), q_heads, dim, generator=generator).to(dtype)
    return RandomBatch(
        q,
        kv,
        start,
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        torch.cat(slots),
        max(queries),
        max(lengths),
        sum(lengths),
        next((r for r, count in enumerate(queries) if count > 1), len(queries)),
    )


def check_attention(library: native.Library) -> float:
    """Largest error over a decode, a prefill and a mixed batch in both dtypes. Raises RuntimeError when too
    large."""
    worst = 0.0
    cases = [
        ([1, 1, 1], [70, 0, 33], 4, 2, 32, None, None, False),
        ([40, 1, 3], [9, 64, 31], 6, 2, 64, 24, 30.0, True),
    ]
    for dtype in TOLERANCE:
        for seed, (queries, contexts, q_heads, kv_heads, dim, window, softcap, with_sinks) in enumerate(cases):
            b = random_batch(queries, contexts, q_heads, kv_heads, dim, dtype, seed)
            generator = torch.Generator().manual_seed(seed)
            new = torch.randn(2, b.q.shape[0], kv_heads, dim, generator=generator).to(dtype)
            written = b.kv_layer.clone()
            native.write_kv(library, written, new[0], new[1], b.slots)
            write_kv_torch(b.kv_layer, new[0], new[1], b.slots)
            if not torch.equal(written.nan_to_num(), b.kv_layer.nan_to_num()):
                raise RuntimeError("self-test: write_kv stored wrong rows")
            sinks = torch.randn(q_heads, generator=generator) if with_sinks else None
            scale = dim**-0.5
            got = native.attention(
                library,
                b.q,
                b.kv_layer,
                b.query_start,
                b.seq_lens,
                b.block_tables,
                scale,
                window,
                softcap,
                sinks,
            )
            want = paged_attention_torch(b.q, b.kv_layer, b, scale=scale, window=window, softcap=softcap, sinks=sinks)
            worst = max(worst, _compare("paged attention", got, want, TOLERANCE[dtype]))
    return worst


def check_rms_norm(library: native.Library) -> float:
    """Largest relative error of the RMS norm in both dtypes. Raises RuntimeError when too large."""
    worst = 0.0
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(5, 96, generator=generator).to(dtype),
            torch.rand(96, generator=generator) + 0.5,
        )
        want = torch.nn.functional.rms_norm(x.float(), (96,), weight, 1e-6)
        got = native.rms_norm(library, x, weight, 1e-6, True)
        worst = max(worst, _compare("rms norm", got, want, tolerance))
    return worst


def _compare(what: str, got: Tensor, want: Tensor, tolerance: float) -> float:
    error = float((got.float() - want.float()).abs().max())
    if not error <= tolerance:  # a NaN fails, too
        raise RuntimeError(f"self-test: {what} in {got.dtype} differs by {error:.2e} (allowed {tolerance:.0e})")
    return error
