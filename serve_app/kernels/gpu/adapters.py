"""Adapters of a linear in Triton, two launches whatever the rows and their adapters: x A^T in pieces of the columns,
then B times its sum, added to the base's result. Each adapter has memory, rank and dtype of its own, which tables on
the device name, so that putting one into a place changes no launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.gpu.common import processors
from serve_app.kernels.linear.tiles import TILE_ROWS, Tiles

LANES = 16  # ranks at a time
COLUMNS = 64
OUTPUTS = 64
# Of the rank of all modules of a linear together: four of 256.
MOST_LANES = 1024
# Fields of an adapter's row of the table: addresses of A and B, lanes (0: it has none here), rank, whether both are
# float32, and of each module its first lane, -1 for none.
FIELDS = 5
PARTS = 4
# Partial sums take at most so many floats.
MOST_SUMS = 1 << 24


def add_deltas(out: Tensor, x: Tensor, tiles: Tiles, table: Tensor, scales: Tensor, blocks: Tensor) -> None:
    """Adds to rows of ``out`` [T, n] what the adapters of ``x`` [T, k] give, both of one dtype and contiguous.

    ``table`` [places + 1, FIELDS + PARTS] int64, ``scales`` [places + 1, PARTS] float32; ``blocks`` [N, 3] int32: of
    each block of outputs its module, its first output and the end of that module's. A [lanes, k] and B [n, rank] are
    contiguous, float32 or bfloat16.
    """
    rows, k = x.shape
    items = len(tiles.count)
    if not items:
        return
    wanted = max(1, 2 * processors(x.device) // items)
    splits = max(1, min(wanted, 8, triton.cdiv(k, 4 * COLUMNS), MOST_SUMS // (rows * MOST_LANES)))
    piece = triton.cdiv(triton.cdiv(k, splits), COLUMNS) * COLUMNS
    sums = torch.empty((splits, rows, MOST_LANES), dtype=torch.float32, device=x.device)
    _shrink[(items, splits)](
        x, sums, tiles.order, tiles.place, tiles.first, tiles.count, table, rows, k, piece,
        TABLE=FIELDS + PARTS, ROWS=TILE_ROWS, LANES=LANES, COLUMNS=COLUMNS, WIDTH=MOST_LANES, num_warps=4,
    )  # fmt: skip
    _expand[(items, len(blocks))](
        out, sums, tiles.order, tiles.place, tiles.first, tiles.count, table, scales, blocks, rows, out.shape[1],
        TABLE=FIELDS + PARTS, FIRST=FIELDS, PARTS=PARTS, SPLITS=splits, ROWS=TILE_ROWS, LANES=LANES, OUTPUTS=OUTPUTS,
        WIDTH=MOST_LANES, num_warps=4,
    )  # fmt: skip


@triton.jit
def _load(at, offsets, mask, wide):
    """Of a matrix in float32 or bfloat16, as float32."""
    if wide != 0:
        values = tl.load(at.to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0.0)
    else:
        values = tl.load(at.to(tl.pointer_type(tl.bfloat16)) + offsets, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _shrink(
    x, sums, order, place, first, count, table, rows, k, piece,
    TABLE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One piece of the columns for one tile of rows: sums[split][row] = x[row] . A[lane]."""
    item = tl.program_id(0)
    split = tl.program_id(1)
    here = tl.load(count + item)
    own = table + tl.load(place + item) * TABLE
    lanes = tl.load(own + 2)
    if here > 0 and lanes > 0:
        a = tl.load(own)
        wide = tl.load(own + 4)
        number = tl.arange(0, ROWS)
        live = number < here
        row = tl.load(order + tl.load(first + item) + number, mask=live, other=0)
        begin = split * piece
        end = tl.minimum(begin + piece, k)
        for lane_group in range(0, lanes, LANES):
            lane = lane_group + tl.arange(0, LANES)
            total = tl.zeros((ROWS, LANES), dtype=tl.float32)
            for start in range(begin, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                inside = column < end
                left = tl.load(
                    x + row[:, None] * k + column[None, :], mask=live[:, None] & inside[None, :], other=0.0
                ).to(tl.float32)  # fmt: skip
                right = _load(
                    a, lane[:, None].to(tl.int64) * k + column[None, :], (lane < lanes)[:, None] & inside[None, :], wide
                )
                total += tl.dot(left, tl.trans(right), input_precision="ieee")
            to = sums + (split * rows + row[:, None]) * WIDTH + lane[None, :]
            tl.store(to, total, mask=live[:, None] & (lane < lanes)[None, :])


@triton.jit
def _expand(
    out, sums, order, place, first, count, table, scales, blocks, rows, n,
    TABLE: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One block of a module's outputs for one tile of rows: out[row] += scale * B . (the sum of all pieces)."""
    item = tl.program_id(0)
    block = blocks + tl.program_id(1) * 3
    here = tl.load(count + item)
    where = tl.load(place + item)
    own = table + where * TABLE
    part = tl.load(block)
    lanes = tl.load(own + 2)
    start = tl.load(own + FIRST + part)
    if here > 0 and lanes > 0 and start >= 0:
        b = tl.load(own + 1)
        rank = tl.load(own + 3)
        wide = tl.load(own + 4)
        number = tl.arange(0, ROWS)
        live = number < here
        row = tl.load(order + tl.load(first + item) + number, mask=live, other=0)
        output = tl.load(block + 1) + tl.arange(0, OUTPUTS)
        inside = output < tl.load(block + 2)
        total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for begin in range(0, rank, LANES):
            lane = begin + tl.arange(0, LANES)
            there = live[:, None] & (lane < rank)[None, :]
            inner = tl.zeros((ROWS, LANES), dtype=tl.float32)
            for split in range(SPLITS):
                inner += tl.load(
                    sums + (split * rows + row[:, None]) * WIDTH + start + lane[None, :], mask=there, other=0.0
                )
            right = _load(
                b, output[:, None].to(tl.int64) * rank + lane[None, :], inside[:, None] & (lane < rank)[None, :], wide
            )
            total += tl.dot(inner, tl.trans(right), input_precision="ieee")
        to = out + row[:, None] * n + output[None, :]
        mask = live[:, None] & inside[None, :]
        base = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        total = base + total * tl.load(scales + where * PARTS + part)
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)
