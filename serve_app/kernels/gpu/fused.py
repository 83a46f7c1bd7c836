"""The small operators between a layer's matrix products in Triton, one launch each;
see ``kernels/reference/operators.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.gpu.common import next_power_of_2

PAGE = tl.constexpr(32)
HEADS_PER_PROGRAM = 4


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`serve_app.kernels.reference.operators.add_rms_norm`; rows up to 32768 wide."""
    rows, width = x.shape
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    block = next_power_of_2(width)
    _add_rms_norm[(rows,)](
        x, x if delta is None else delta, weight, normed, total, eps,
        WIDTH=width, BLOCK=block, ADDS=delta is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return normed, total


def rotate_and_write(
    qkv: Tensor,
    kv_layer: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_norm: tuple[Tensor, float] | None,
    k_norm: tuple[Tensor, float] | None,
) -> Tensor:
    """:func:`serve_app.kernels.reference.operators.rotate_and_write`."""
    tokens, kv_heads, dim = len(qkv), kv_layer.shape[2], kv_layer.shape[4]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty((tokens, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    half = cos.shape[1]
    block = min(HEADS_PER_PROGRAM, next_power_of_2(kv_heads))
    _rotate_and_write[(tokens, -(-q_heads // block) + -(-kv_heads // block))](
        qkv, q, kv_layer, cos, sin, positions, slots,
        q if q_norm is None else q_norm[0], q if k_norm is None else k_norm[0],
        0.0 if q_norm is None else q_norm[1],
        qkv.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), cos.stride(0),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, HALF_PADDED=next_power_of_2(half),
        REST=dim - 2 * half, REST_PADDED=next_power_of_2(dim - 2 * half), DIM_PADDED=next_power_of_2(dim),
        NORMED=q_norm is not None, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return q


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """:func:`serve_app.kernels.attention.write_kv`."""
    tokens, kv_heads, dim = k.shape
    if k.stride(2) != 1 or v.stride(2) != 1 or k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    _write_kv[(tokens,)](
        k, v, kv_layer, slots, k.stride(0), k.stride(1),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
        HEADS=kv_heads, HEADS_PADDED=next_power_of_2(kv_heads), DIM=dim, DIM_PADDED=next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def swiglu(gate_up: Tensor) -> Tensor:
    """:func:`serve_app.kernels.reference.operators.swiglu`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(width, 1024))](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=1024, num_warps=4)
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`serve_app.kernels.linear.fp8.quantize_rows`; rows up to 65536 wide."""
    x = x.contiguous()
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    _quantize_rows[(rows,)](x, codes, scale, WIDTH=width, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return codes, scale


@triton.jit
def _quantize_rows(x, codes, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(scale + row, step)
    rounded = tl.minimum(tl.maximum(value / step, -448.0), 448.0).to(codes.dtype.element_ty)
    tl.store(codes + row * WIDTH + column, rounded, mask=inside)


@triton.jit
def _add_rms_norm(
    x, delta, weight, normed, total, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    where = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + where, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + where, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the next layer will read
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + where, (value * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_write(
    qkv, q, kv, cos, sin, positions, slots, q_gain, k_gain, eps,
    qkv_row, kv_plane, kv_block, kv_head, table_row,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
    NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's heads, BLOCK at a time: first all query heads, then key and value heads together."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (Q_HEADS + BLOCK - 1) // BLOCK
    is_query = part < Q_PARTS
    head = tl.where(is_query, part, part - Q_PARTS) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.where(is_query, Q_HEADS, KV_HEADS)
    live = head < heads
    source = qkv + token * qkv_row + (head + tl.where(is_query, 0, Q_HEADS)) * DIM

    column = tl.arange(0, HALF_PADDED)
    mask = live[:, None] & (column < HALF)[None, :]
    low = tl.load(source[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + HALF + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if REST > 0:
        behind = 2 * HALF + tl.arange(0, REST_PADDED)
        rest_mask = live[:, None] & (behind < DIM)[None, :]
        rest = tl.load(source[:, None] + behind[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        gain = k_gain
        if is_query:
            gain = q_gain
        low = low * scale * tl.load(gain + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        high = high * scale * tl.load(gain + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        if REST > 0:
            rest = rest * scale * tl.load(gain + behind, mask=behind < DIM, other=0.0).to(tl.float32)[None, :]

    position = tl.load(positions + token) * table_row
    c = tl.load(cos + position + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + position + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    turned_low = low * c - high * s
    turned_high = high * c + low * s

    if is_query:
        target = q + (token * Q_HEADS + head) * DIM
        tl.store(target[:, None] + column[None, :], turned_low.to(q.dtype.element_ty), mask=mask)
        tl.store(target[:, None] + HALF + column[None, :], turned_high.to(q.dtype.element_ty), mask=mask)
        if REST > 0:
            tl.store(target[:, None] + behind[None, :], rest.to(q.dtype.element_ty), mask=rest_mask)
    else:
        slot = tl.load(slots + token)
        place = kv + (slot // PAGE) * kv_block + head * kv_head + (slot % PAGE) * DIM
        tl.store(place[:, None] + column[None, :], turned_low.to(kv.dtype.element_ty), mask=mask)
        tl.store(place[:, None] + HALF + column[None, :], turned_high.to(kv.dtype.element_ty), mask=mask)
        if REST > 0:
            tl.store(place[:, None] + behind[None, :], rest.to(kv.dtype.element_ty), mask=rest_mask)
        whole = tl.arange(0, DIM_PADDED)
        value_mask = live[:, None] & (whole < DIM)[None, :]
        value = tl.load(source[:, None] + KV_HEADS * DIM + whole[None, :], mask=value_mask, other=0.0)
        # By way of float32: there is no direct conversion from bfloat16 to float8.
        tl.store(
            place[:, None] + kv_plane + whole[None, :], value.to(tl.float32).to(kv.dtype.element_ty), mask=value_mask
        )


@triton.jit
def _write_kv(
    k, v, kv, slots, token_stride, head_stride, kv_plane, kv_block, kv_head,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    column = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < HEADS) & (column < DIM)
    source = token * token_stride + head * head_stride + column
    slot = tl.load(slots + token)
    place = (slot // PAGE) * kv_block + head * kv_head + (slot % PAGE) * DIM + column
    tl.store(kv + place, tl.load(k + source, mask=mask, other=0.0).to(tl.float32).to(kv.dtype.element_ty), mask=mask)
    tl.store(
        kv + kv_plane + place,
        tl.load(v + source, mask=mask, other=0.0).to(tl.float32).to(kv.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _swiglu(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=inside)
