"""Routed experts in Triton: two grouped products and a sum, of which none waits for the host.

A program takes some outputs of one expert for a tile of that expert's rows. With few rows the tile is the whole batch,
and rows that have not chosen the expert are masked::

    few rows    tile e: expert e, all rows            experts that nobody has chosen return at once, unread
    many rows   pairs of a row and an expert, sorted by expert, cut into tiles that belong to one expert each

Weights in four bits (:class:`serve_app.kernels.coded.Coded`) are read as codes and unpacked in registers.

Grids depend on the numbers of rows, choices and experts alone, so that a captured graph serves any routing. A row's
choices are summed up in their order, without atomics: the same rows give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.coded import FLOAT4 as FLOAT4_FORM
from serve_app.kernels.coded import FLOAT8 as FLOAT8_FORM
from serve_app.kernels.coded import Coded
from serve_app.kernels.experts import Experts
from serve_app.kernels.gpu.common import next_power_of_2, widens


@dataclass(slots=True, frozen=True)
class ExpertTile:
    """``m`` rows by ``n`` outputs, of two weights at a time in the first product, over ``k`` inputs at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# How a weight lies: numbers, or codes of MXFP4, of whole numbers, of float8.
PLAIN, FLOAT4, WHOLE4, FLOAT8 = range(4)
# Up to so many rows the tile is the whole batch; float32 is multiplied without tensor cores, from registers.
FEW_ROWS, FEW_ROWS_EXACT = 64, 32


def choose_tile(rows: int, choices: int, experts: int, item_bytes: int) -> tuple[ExpertTile, bool]:
    """The tile, and whether it is the whole batch."""
    if item_bytes > 2:
        return ExpertTile(16 if rows <= 16 else 32, 32, 32, 4, 2), rows <= FEW_ROWS_EXACT
    if rows <= FEW_ROWS:
        return ExpertTile(max(16, next_power_of_2(rows)), 32, 128, 4, 3), True
    each = rows * choices // experts
    if each <= 16:
        return ExpertTile(16, 32, 128, 4, 3), False
    if each <= 96:
        return ExpertTile(64, 64, 64, 4, 3), False
    return ExpertTile(128, 64, 64, 8, 3), False


def mix_experts(x: Tensor, index: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """:func:`serve_app.kernels.reference.experts.mix_experts`."""
    (rows, hidden), choices = x.shape, index.shape[1]
    count, width = experts.gate.shape[:2]
    if rows == 0:
        return torch.empty_like(x)
    x, index, weights = x.contiguous(), index.contiguous(), weights.contiguous()
    tile, direct = choose_tile(rows, choices, count, x.element_size())
    if direct:
        order, starts, firsts, tiles = index, index, index, count
    else:
        order, starts, firsts, tiles = sort_pairs(index, count, tile.m)
    inner = torch.empty((rows * choices, width), dtype=x.dtype, device=x.device)
    each = torch.empty((rows * choices, hidden), dtype=x.dtype, device=x.device)
    options = dict(
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, CHOICES=choices, CHOICES_PADDED=next_power_of_2(choices),
        EXPERTS=count, EXPERTS_PADDED=next_power_of_2(count), DIRECT=direct, WIDE=widens(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    group = 1 if isinstance(experts.gate, Tensor) else experts.gate.form.group
    limit, first_bias, second_bias, last_bias = (
        experts.activation.limit, experts.gate_bias, experts.up_bias, experts.down_bias,
    )  # fmt: skip
    gate, up, down = (_lying(weight, x) for weight in (experts.gate, experts.up, experts.down))
    _gate_up[(tiles, triton.cdiv(width, tile.n))](
        x, index, order, starts, firsts, gate.values, up.values, gate.scales, up.scales,
        x if first_bias is None else first_bias, x if second_bias is None else second_bias, inner, rows, width, hidden,
        *gate.strides, 0 if first_bias is None else first_bias.stride(0),
        0 if first_bias is None else first_bias.stride(1), experts.activation.alpha, limit,
        KIND=gate.kind, GROUP=group, BIASED=first_bias is not None, LIMITED=bool(limit), **options,
    )  # fmt: skip
    _down[(tiles, triton.cdiv(hidden, tile.n))](
        inner, index, order, starts, firsts, down.values, down.scales, x if last_bias is None else last_bias, each,
        rows, hidden, width, *down.strides, 0 if last_bias is None else last_bias.stride(0),
        KIND=down.kind, GROUP=group, BIASED=last_bias is not None, **options,
    )  # fmt: skip
    out = torch.empty_like(x)
    _sum_choices[(rows, triton.cdiv(hidden, 1024))](each, weights, out, hidden, CHOICES=choices, BLOCK=1024)
    return out


@dataclass(slots=True, frozen=True)
class _Lying:
    """``strides`` of ``values`` by expert, output and input (codes of four bits by two), and of ``scales`` by expert
    and output.
    """

    values: Tensor
    scales: Tensor
    strides: tuple[int, int, int, int, int]
    kind: int


def _lying(weight: Tensor | Coded, nothing: Tensor) -> _Lying:
    if isinstance(weight, Tensor):
        expert, output, column = weight.stride()
        return _Lying(weight, nothing, (expert, output, column, 0, 0), PLAIN)
    kind = {FLOAT4_FORM: FLOAT4, FLOAT8_FORM: FLOAT8}.get(weight.form, WHOLE4)
    (expert, output, _), (scale_expert, scale_output, _) = weight.codes.stride(), weight.scales.stride()
    return _Lying(weight.codes, weight.scales, (expert, output, 1, scale_expert, scale_output), kind)


def sort_pairs(index: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """For ``index`` [T, C]: pairs sorted by expert [T * C], where each expert's pairs start [E + 1], where its tiles
    of ``block`` pairs start [E + 1], and how many tiles there are at most.
    """
    chosen = index.reshape(-1)
    ordered, order = chosen.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=index.device))
    firsts = torch.zeros_like(starts)
    firsts[1:] = ((starts.diff() + block - 1) // block).cumsum(0)
    return order, starts, firsts, min(len(chosen), len(chosen) // block + experts)


@triton.jit
def _pairs_of_tile(
    tile, index, order, starts, firsts, rows, BLOCK_M: tl.constexpr, CHOICES: tl.constexpr,
    CHOICES_PADDED: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The tile's expert, its pairs [BLOCK_M] int64 and which of them there are; none: there is nothing to do."""
    lane = tl.arange(0, BLOCK_M)
    if DIRECT:
        expert = tile.to(tl.int64)
        choice = tl.arange(0, CHOICES_PADDED)
        inside = (lane < rows)[:, None] & (choice < CHOICES)[None, :]
        found = tl.load(index + lane[:, None] * CHOICES + choice[None, :], mask=inside, other=-1)
        hit = found == expert
        live = tl.max(hit.to(tl.int32), 1) > 0
        pair = (lane * CHOICES + tl.sum(tl.where(hit, choice[None, :], 0), 1)).to(tl.int64)
    else:
        each = tl.arange(0, EXPERTS_PADDED)
        ends = tl.load(firsts + 1 + each, mask=each < EXPERTS, other=0)
        # Experts whose tiles all lie before this one; all of them where the tile is one of the surplus.
        expert = tl.sum(((ends <= tile) & (each < EXPERTS)).to(tl.int64), 0)
        known = expert < EXPERTS
        last = tl.load(starts + expert + 1, mask=known, other=0)
        place = (
            tl.load(starts + expert, mask=known, other=0)
            + (tile - tl.load(firsts + expert, mask=known, other=0)) * BLOCK_M
            + lane
        )
        live = known & (place < last)
        pair = tl.load(order + place, mask=live, other=0)
    return expert, pair, live


@triton.jit
def _weights(
    values, scales, start, scale_start, output, outputs, base, columns, of_output, of_input, scale_output,
    KIND: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of one expert's weight, columns from ``base`` on."""
    if KIND == 0:
        column = base + tl.arange(0, BLOCK_K)
        mask = (column < columns)[:, None] & (output < outputs)[None, :]
        place = column[:, None] * of_input + output[None, :] * of_output
        found = tl.load(values + start + place, mask=mask, other=0.0)
    else:
        if KIND == 3:
            byte = base + tl.arange(0, BLOCK_K)
            mask = (output < outputs)[:, None] & (byte < columns)[None, :]
            each = tl.load(values + start + output[:, None] * of_output + byte[None, :], mask=mask, other=0).to(
                tl.int32
            )
        else:
            byte = base // 2 + tl.arange(0, BLOCK_K // 2)
            mask = (output < outputs)[:, None] & (byte < columns // 2)[None, :]
            codes = tl.load(values + start + output[:, None] * of_output + byte[None, :], mask=mask, other=0)
            each = tl.interleave(codes & 15, codes >> 4).to(tl.int32)
        # Of a tile several groups, or a part of one.
        SHARED: tl.constexpr = min(GROUP, BLOCK_K)
        GROUPS: tl.constexpr = BLOCK_K // SHARED
        group = base // GROUP + tl.arange(0, GROUPS)
        mask = (output < outputs)[:, None] & (group < columns // GROUP)[None, :]
        own = tl.load(scales + scale_start + output[:, None] * scale_output + group[None, :], mask=mask, other=0)
        if KIND == 1:
            # Twice the value, and the exponent where float32 has it.
            size = each & 7
            size = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
            number = tl.where(each > 7, -size, size).to(tl.float32) * 0.5
            factor = (own.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        elif KIND == 2:
            number = (each - 8).to(tl.float32)
            factor = own.to(tl.float32)
        else:
            # The exponent is biased by 7 there and by 127 in float32; without one, eighths of 2**-6.
            size = ((each & 127) + (120 << 3) << 20).to(tl.float32, bitcast=True)
            size = tl.where(each & 127 < 8, (each & 7).to(tl.float32) * 0.001953125, size)
            number = tl.where(each > 127, -size, size)
            factor = own
        spread = tl.broadcast_to(factor[:, :, None], (BLOCK_N, GROUPS, SHARED))
        product = number * tl.reshape(spread, (BLOCK_N, BLOCK_K))
        if KIND == 2:
            product = product.to(scales.dtype.element_ty)
        found = tl.trans(product.to(TYPE))
    return found


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    x, index, order, starts, firsts, gate, up, gate_scales, up_scales, gate_bias, up_bias, inner, rows, width, hidden,
    of_expert, of_output, of_input, scale_expert, scale_output, bias_expert, bias_output, alpha, limit,
    KIND: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHOICES: tl.constexpr, CHOICES_PADDED: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    DIRECT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    expert, pair, live = _pairs_of_tile(
        tl.program_id(0), index, order, starts, firsts, rows, BLOCK_M, CHOICES, CHOICES_PADDED, EXPERTS,
        EXPERTS_PADDED, DIRECT,
    )  # fmt: skip
    if tl.max(live.to(tl.int32), 0) == 0:
        return
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    given = x + (pair // CHOICES)[:, None] * hidden + column[None, :]
    start, scale_start = expert * of_expert, expert * scale_expert
    gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(0, hidden, BLOCK_K):
        there = column < hidden - base
        left = tl.load(given + base, mask=live[:, None] & there[None, :], other=0.0)
        first = _weights(
            gate, gate_scales, start, scale_start, output, width, base, hidden, of_output, of_input, scale_output,
            KIND, BLOCK_K, BLOCK_N, GROUP, x.dtype.element_ty,
        )  # fmt: skip
        second = _weights(
            up, up_scales, start, scale_start, output, width, base, hidden, of_output, of_input, scale_output,
            KIND, BLOCK_K, BLOCK_N, GROUP, x.dtype.element_ty,
        )  # fmt: skip
        if WIDE:
            left, first, second = left.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
        gates = tl.dot(left, first, gates, input_precision="ieee")
        ups = tl.dot(left, second, ups, input_precision="ieee")
    if BIASED:
        place = expert * bias_expert + output * bias_output
        gates += tl.load(gate_bias + place, mask=output < width, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(up_bias + place, mask=output < width, other=0.0).to(tl.float32)[None, :]
    if LIMITED:
        gates = tl.minimum(gates, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit)
        result = (ups + 1.0) * (gates / (1.0 + tl.exp(-gates * alpha)))
    else:
        result = gates / (1.0 + tl.exp(-gates)) * ups
    target = inner + pair[:, None] * width + output[None, :]
    tl.store(target, result.to(inner.dtype.element_ty), mask=live[:, None] & (output < width)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _down(
    inner, index, order, starts, firsts, down, scales, bias, each, rows, hidden, width,
    of_expert, of_output, of_input, scale_expert, scale_output, bias_expert,
    KIND: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHOICES: tl.constexpr, CHOICES_PADDED: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    DIRECT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    expert, pair, live = _pairs_of_tile(
        tl.program_id(0), index, order, starts, firsts, rows, BLOCK_M, CHOICES, CHOICES_PADDED, EXPERTS,
        EXPERTS_PADDED, DIRECT,
    )  # fmt: skip
    if tl.max(live.to(tl.int32), 0) == 0:
        return
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    given = inner + pair[:, None] * width + column[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(0, width, BLOCK_K):
        there = column < width - base
        left = tl.load(given + base, mask=live[:, None] & there[None, :], other=0.0)
        right = _weights(
            down, scales, expert * of_expert, expert * scale_expert, output, hidden, base, width, of_output, of_input,
            scale_output, KIND, BLOCK_K, BLOCK_N, GROUP, inner.dtype.element_ty,
        )  # fmt: skip
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if BIASED:
        acc += tl.load(bias + expert * bias_expert + output, mask=output < hidden, other=0.0).to(tl.float32)[None, :]
    target = each + pair[:, None] * hidden + output[None, :]
    tl.store(target, acc.to(each.dtype.element_ty), mask=live[:, None] & (output < hidden)[None, :])


@triton.jit
def _sum_choices(each, weights, out, hidden, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        pair = row * CHOICES + choice
        part = tl.load(each + pair * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)
