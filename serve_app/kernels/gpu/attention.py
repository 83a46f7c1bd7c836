"""Paged attention in Triton: prefill, chunked prefill, verification of drafts and decode are one kernel.

A program takes a tile of queries of one request and one KV head, and walks over that request's keys::

    rows of a tile:  token 0: heads of the group | token 1: heads of the group | ...     BLOCK_M rows for tl.dot
    keys:            tiles of BLOCK_N, gathered through the block table                  BLOCK_N is not the block's 32

All query heads of a KV head share each key that is read. Where tiles are too few to fill the device (small batches),
the keys of a tile are split over several programs and a second kernel joins what they found ("flash decoding").
Decodes and prompts in one batch are two launches. Lengths are read on the device only, so that a launch can be captured
in a CUDA graph and replayed on other lengths.

A latent (:mod:`serve_app.models.latent`) is one head's key and value in one, wide, and read by all query heads: these
are shared out among programs, which read the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.gpu.common import next_power_of_2, processors, shared_memory, widens
from serve_app.kernels.gpu.plan import BatchSlice, Launch, plan_launch

if TYPE_CHECKING:
    from serve_app.kernels.batch import AttentionBatch

PAGE = tl.constexpr(32)  # tokens per KV block
LOG2E = tl.constexpr(1.4426950408889634)
# Query heads of a latent that one program has: more would not fit its registers.
LATENT_GROUP = 16


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """:func:`serve_app.kernels.attention.paged_attention`; the cache may also be float8_e4m3fn (scale 1).

    Decodes at the head of a batch of prompts get a launch of their own: tiles for prompts would be nearly empty.
    """
    if q.stride(2) != 1:
        q = q.contiguous()
    if len(kv_layer) == 1:
        kv_layer = _shared(kv_layer, q.shape[1])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    whole = BatchSlice(0, len(batch.seq_lens), 0, len(q), batch.max_query_len)
    for part in [whole] if launch is not None else whole.divided(batch.decodes):
        _run(part, launch or _plan(part, q, kv_layer, batch), q, kv_layer, batch, out, scale, window, softcap, sinks)
    return out


def _shared(kv_layer: Tensor, q_heads: int) -> Tensor:
    """A cache of latents, [1, blocks, 1, 32, D], as keys and values in the same place, of so many heads in the same
    place that each has at most 16 queries.
    """
    heads = next(n for n in range(1, q_heads + 1) if q_heads % n == 0 and q_heads // n <= LATENT_GROUP)
    return kv_layer.expand(2, -1, heads, -1, -1)


def _plan(part: BatchSlice, q: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> Launch:
    return plan_launch(
        requests=part.requests,
        tokens=part.tokens,
        max_query_len=part.max_query_len,
        max_seq_len=batch.max_seq_len,
        group=q.shape[1] // kv_layer.shape[2],
        kv_heads=kv_layer.shape[2],
        dim=q.shape[2],
        item_bytes=q.element_size(),
        units=processors(q.device),
        shared=shared_memory(q.device),
    )


def _run(
    part: BatchSlice,
    launch: Launch,
    q: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Writes the rows of ``part`` to ``out``."""
    _, q_heads, dim = q.shape
    kv_heads, splits = kv_layer.shape[2], launch.splits
    # Of the part's tokens only, which the kernel counts from the batch's first.
    shape = (part.tokens, q_heads, splits)
    partial = out if splits == 1 else torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    stats = out if splits == 1 else torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    meta = _head_constants(q_heads, kv_heads, dim, latent=kv_layer.stride(0) == 0)
    # Counted from a token in the midst of a tile, the last request's may end one tile later.
    tiles = launch.tiles + (part.first_token > 0)
    _attend[(tiles, kv_heads, splits)](
        q, kv_layer, batch.query_start, batch.seq_lens, batch.block_tables, out, partial, stats,
        out if sinks is None else sinks,
        scale, softcap or 1.0, part.first, part.last, part.first_token,
        q.stride(0), q.stride(1), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
        batch.block_tables.stride(0),
        **meta,
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, WINDOW=window or 0, CAPPED=bool(softcap),
        SINKS=sinks is not None, DECODE=part.max_query_len == 1, SPLITS=splits, WIDE=widens(q.dtype),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if splits > 1:
        _join[(part.tokens, q_heads)](
            partial, stats, out, out if sinks is None else sinks, part.first_token,
            HEADS=q_heads, DIM=dim, DIM_PADDED=max(16, next_power_of_2(dim)),
            SPLITS=splits, SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip


@functools.cache
def _head_constants(q_heads: int, kv_heads: int, dim: int, *, latent: bool = False) -> dict[str, int]:
    """A latent is wide, and a little more than a power of two: what is more is a piece of its own."""
    padded = max(16, next_power_of_2(dim))
    rest = dim - padded // 2 if latent and dim < padded and padded >= 32 else 0
    return {
        "HEADS": q_heads,
        "GROUP": q_heads // kv_heads,
        "DIM": dim,
        "DIM_PADDED": padded // 2 if rest else padded,
        "REST": rest,
        "REST_PADDED": max(16, next_power_of_2(rest)) if rest else 16,
    }


# Numbers that change from batch to batch must not make Triton compile anew.
@triton.jit(do_not_specialize=["first_request", "requests", "first_token", "table_row"])
def _attend(
    q, kv, query_start, seq_lens, tables, out, partial, stats, sinks,
    scale, softcap, first_request, requests, first_token,
    q_token, q_head, kv_plane, kv_block, kv_head_stride, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, DECODE: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # queries per tile
    if DECODE:
        request = tile + first_request
        first = 0
    else:
        # Request r owns the tiles from query_start[r] // TOKENS + r on: enough for its queries, and found by bisection.
        tile += tl.load(query_start + first_request) // TOKENS + first_request
        low: tl.int32 = first_request
        high: tl.int32 = requests
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(query_start + middle) // TOKENS + middle <= tile:
                low = middle
            else:
                high = middle
        request = low
        first = (tile - tl.load(query_start + request) // TOKENS - request) * TOKENS
    begin = tl.load(query_start + request)
    queries = tl.load(query_start + request + 1) - begin
    if first >= queries:
        return
    length = tl.load(seq_lens + request)
    before = length - queries  # position of the request's first query

    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < queries)
    position = before + token
    column = tl.arange(0, DIM_PADDED)
    inside = column < DIM
    rows = (begin + token).to(tl.int64)
    tile_q = tl.load(
        q + rows[:, None] * q_token + head[:, None] * q_head + column[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    if WIDE:
        tile_q = tile_q.to(tl.float32)
    rest_column = DIM_PADDED + tl.arange(0, REST_PADDED)
    rest_inside = rest_column < DIM
    rest_q = tile_q
    if REST:
        rest_q = tl.load(
            q + rows[:, None] * q_token + head[:, None] * q_head + rest_column[None, :],
            mask=live[:, None] & rest_inside[None, :],
            other=0.0,
        ).to(tile_q.dtype)

    # Keys that any query of the tile sees, in whole tiles, and this program's share of them.
    end = before + tl.minimum(first + TOKENS, queries)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(before + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(end - start, BLOCK_N), SPLITS) * BLOCK_N
    start = start + split * share
    stop = tl.minimum(start + share, end)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and SPLITS == 1:
        best = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total = total + 1.0
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    rest = tl.zeros([BLOCK_M, REST_PADDED], tl.float32)
    table = tables + request.to(tl.int64) * table_row
    kv += kv_head * kv_head_stride
    # Whole tiles of keys that every query of the tile sees need no masks: a prompt behind 8,192 tokens was 1.2 times as
    # fast on an H100. For few queries a second loop costs more than masks do: 64 decodes took 1.2 times as long.
    plain = start
    if WINDOW == 0 and BLOCK_M >= 128:
        plain = tl.maximum(start, tl.minimum(stop, (before + first + 1) // BLOCK_N * BLOCK_N))
        acc, rest, total, best = _walk(
            acc, rest, total, best, tile_q, rest_q,
            kv, table, start, plain, end, position, scale, softcap, kv_plane, kv_block,
            DIM=DIM, DIM_PADDED=DIM_PADDED, REST=REST, REST_PADDED=REST_PADDED,
            BLOCK_N=BLOCK_N, WINDOW=WINDOW, CAPPED=CAPPED, MASKED=False,
        )  # fmt: skip
    acc, rest, total, best = _walk(
        acc, rest, total, best, tile_q, rest_q,
        kv, table, plain, stop, end, position, scale, softcap, kv_plane, kv_block,
        DIM=DIM, DIM_PADDED=DIM_PADDED, REST=REST, REST_PADDED=REST_PADDED,
        BLOCK_N=BLOCK_N, WINDOW=WINDOW, CAPPED=CAPPED, MASKED=True,
    )  # fmt: skip

    place = rows * HEADS + head
    wanted = live[:, None] & inside[None, :]
    if SPLITS == 1:
        divisor = tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * DIM + column[None, :], (acc / divisor).to(out.dtype.element_ty), mask=wanted)
        if REST:
            found = (rest / divisor).to(out.dtype.element_ty)
            tl.store(
                out + place[:, None] * DIM + rest_column[None, :], found, mask=live[:, None] & rest_inside[None, :]
            )
    else:
        place = (place - first_token * HEADS) * SPLITS + split
        tl.store(partial + place[:, None] * DIM + column[None, :], acc, mask=wanted)
        if REST:
            tl.store(
                partial + place[:, None] * DIM + rest_column[None, :], rest, mask=live[:, None] & rest_inside[None, :]
            )
        tl.store(stats + place * 2, best, mask=live)
        tl.store(stats + place * 2 + 1, total, mask=live)


@triton.jit
def _walk(
    acc, rest, total, best, tile_q, rest_q, kv, table, start, stop, end, position, scale, softcap, kv_plane, kv_block,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes in the keys from ``start`` to ``stop``, of which those before ``end`` exist; ``kv``: of the KV head."""
    column = tl.arange(0, DIM_PADDED)
    inside = column < DIM
    more = DIM_PADDED + tl.arange(0, REST_PADDED)
    for base in range(start, stop, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        exists = key < end
        block = tl.load(table + key // PAGE, mask=exists, other=0) if MASKED else tl.load(table + key // PAGE)
        where = block.to(tl.int64) * kv_block + (key % PAGE) * DIM
        of_keys = kv + where[None, :] + column[:, None]
        of_values = kv + kv_plane + where[:, None] + column[None, :]
        if MASKED:
            keys = tl.load(of_keys, mask=exists[None, :] & inside[:, None], other=0.0)
        elif DIM_PADDED <= DIM:
            keys = tl.load(of_keys)
        else:
            keys = tl.load(of_keys, mask=inside[:, None], other=0.0)
        keys = keys.to(tile_q.dtype)
        score = tl.dot(tile_q, keys, input_precision="ieee")
        if REST:
            pieces = kv + where[None, :] + more[:, None]
            keys = tl.load(pieces, mask=exists[None, :] & (more < DIM)[:, None], other=0.0).to(tile_q.dtype)
            score = tl.dot(rest_q, keys, score, input_precision="ieee")
        if CAPPED:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)), which saturates where exp overflows.
            score = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(score * (scale * 2.0 * LOG2E / softcap)))) * LOG2E
        else:
            score = score * (scale * LOG2E)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & exists[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        anchor = highest
        if MASKED:
            # A row may have seen nothing yet: -inf less -inf must not become NaN.
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - anchor[:, None])
        kept = tl.exp2(best - anchor)
        total = total * kept + tl.sum(weight, 1)
        if MASKED:
            values = tl.load(of_values, mask=exists[:, None] & inside[None, :], other=0.0)
        elif DIM_PADDED <= DIM:
            values = tl.load(of_values)
        else:
            values = tl.load(of_values, mask=inside[None, :], other=0.0)
        values = values.to(tile_q.dtype)
        acc = acc * kept[:, None]
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision="ieee")
        if REST:
            pieces = kv + kv_plane + where[:, None] + more[None, :]
            values = tl.load(pieces, mask=exists[:, None] & (more < DIM)[None, :], other=0.0).to(tile_q.dtype)
            rest = tl.dot(weight.to(values.dtype), values, rest * kept[:, None], input_precision="ieee")
        best = highest
    return acc, rest, total, best


@triton.jit(do_not_specialize=["first_token"])
def _join(
    partial, stats, out, sinks, first_token,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one query and head: each is a softmax over its own keys, with its maximum and sum."""
    head = tl.program_id(1)
    place = (tl.program_id(0).to(tl.int64) * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, DIM_PADDED)
    best = tl.load(stats + place * 2)
    total = tl.load(stats + place * 2 + 1)
    highest = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(best - highest)
    whole = tl.sum(total * weight, 0)
    if SINKS:
        whole = whole + tl.exp2(sink - highest)
    # A split without keys has left its part unwritten.
    part = tl.load(
        partial + place[:, None] * DIM + column[None, :], mask=(total > 0)[:, None] & (column < DIM)[None, :], other=0.0
    )
    joined = tl.sum(part * weight[:, None], 0) / whole
    where = ((tl.program_id(0).to(tl.int64) + first_token) * HEADS + head) * DIM + column
    tl.store(out + where, joined.to(out.dtype.element_ty), mask=column < DIM)
