"""Matrix products of a few rows in Triton, for decode: the weights are read once, as fast as the device reads.

A product of a few rows takes as long as its weights take to be read. cuBLAS reads those of a layer of an 8B at 60 to
90 % of an H100's bandwidth (`benchmarks/results/`), since its tiles leave the last wave of programs half empty and its
split products need a second launch; one row here gets 80 to 98 %. A program takes ``BLOCK_N`` outputs and walks over
all of ``k``, and there are about as many programs as run at once::

    weight [n, k]    program 0: rows 0 .. BLOCK_N     | over k in tiles of BLOCK_K, several of them on their way
                     program 1: rows BLOCK_N .. 2 ..  |

One row is multiplied in registers, more by the tensor cores. Which tile sizes a shape gets for how many rows, or
cuBLAS, is measured at load on the model's own weights (:func:`choose`).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.gpu.common import INTERPRETED, widens
from serve_app.kernels.linear.base import PlainLinear

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Tile:
    """``n`` outputs and ``k`` inputs of a weight at a time, for up to ``rows`` rows; 1: without tensor cores."""

    rows: int
    n: int
    k: int
    warps: int
    stages: int

    def fits(self, weight: Tensor) -> bool:
        return weight.shape[0] % self.n == 0 and weight.shape[1] % self.k == 0


# By the number of rows up to which they serve, what is tried.
# Of some sixty on an H100 with the shapes of an 8B these were the best; for more rows none beat cuBLAS by 5 %.
TILES = {
    1: (Tile(1, 8, 1024, 8, 1), Tile(1, 4, 512, 2, 1)),
    16: (Tile(16, 64, 128, 4, 6), Tile(16, 32, 128, 4, 6)),
}
MOST_ROWS = max(TILES)
# Less is noise, and cuBLAS is one thing less to depend on.
MIN_GAIN = 1.03
# Weights that are multiplied in turn when a tile is timed, so that none of them comes out of the L2 cache.
IN_TURN_BYTES = 200 << 20
TOLERANCE = 0.02


class FewRowsLinear(PlainLinear):
    """A linear by torch, except for few rows where :func:`choose` has found something faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.tiles: dict[int, Tile] = {}

    def __call__(self, x: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        tile = self.tiles.get(served_by(len(x))) if 0 < len(x) <= MOST_ROWS else None
        return F.linear(x, self.weight, self.bias) if tile is None else multiply(x, self.weight, self.bias, tile)


def served_by(rows: int) -> int:
    """The key of :data:`TILES` for so many rows."""
    return next(most for most in TILES if rows <= most)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """``x @ weight.T + bias`` for x [at most ``tile.rows``, k], with sums in float32."""
    if x.stride(1) != 1:
        x = x.contiguous()
    (rows, k), n = x.shape, len(weight)
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    given = x if bias is None else bias
    options = {"BIASED": bias is not None, "num_warps": tile.warps, "num_stages": tile.stages}
    if tile.rows == 1:
        _one_row[(n // tile.n,)](x, weight, given, out, k, BLOCK_N=tile.n, BLOCK_K=tile.k, **options)
    else:
        _few_rows[(n // tile.n,)](
            x, weight, given, out, rows, n, k, x.stride(0),
            BLOCK_M=tile.rows, BLOCK_N=tile.n, BLOCK_K=tile.k, WIDE=widens(x.dtype), **options,
        )  # fmt: skip
    return out


@triton.jit
def _one_row(
    x, weight, bias, out, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    start = weight + column.to(tl.int64)[:, None] * k + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Unrolled, so that loads of several tiles are on their way.
    for base in tl.range(0, k, BLOCK_K, loop_unroll_factor=4):
        tile = tl.load(start + base, eviction_policy="evict_first").to(tl.float32)
        acc += tile * tl.load(x + base + inner).to(tl.float32)[None, :]
    result = tl.sum(acc, 1)
    if BIASED:
        result += tl.load(bias + column).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, out, rows, n, k, x_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    live = row < rows
    inner = tl.arange(0, BLOCK_K)
    start = weight + column.to(tl.int64)[:, None] * k + inner[None, :]
    given = x + row[:, None] * x_row + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(0, k, BLOCK_K):
        tile = tl.load(start + base, eviction_policy="evict_first")
        left = tl.load(given + base, mask=live[:, None], other=0.0)
        if WIDE:
            tile, left = tile.to(tl.float32), left.to(tl.float32)
        acc = tl.dot(left, tl.trans(tile), acc)
    if BIASED:
        acc += tl.load(bias + column).to(tl.float32)[None, :]
    where = out + row[:, None] * n + column[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=live[:, None])


@dataclass(slots=True)
class Choice:
    """What :func:`choose` has found, for the log: by shape of the weight and number of rows."""

    gains: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.gains:
            return "few rows by cuBLAS"
        best, worst = max(self.gains.values()), min(self.gains.values())
        return f"few rows by Triton ({worst:.2f} to {best:.2f} times as fast as cuBLAS, cases: {len(self.gains)})"


# Seconds of one call of what is measured.
Clock = Callable[[Callable[[], object]], float]


@torch.inference_mode()
def choose(linears: Sequence[FewRowsLinear], clock: Clock | None = None) -> Choice:
    """Gives each shape of ``linears`` the tiles that are right and faster than cuBLAS on this device. Only weights in
    bfloat16 and float16.
    """
    found = Choice()
    shapes: dict[tuple[int, ...], list[FewRowsLinear]] = {}
    for linear in linears:
        weight = linear.weight
        if weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous():
            shapes.setdefault((*weight.shape, linear.bias is not None), []).append(linear)
    for (n, k, _), alike in shapes.items():
        some = alike[: max(2, IN_TURN_BYTES // alike[0].weight.nbytes)]
        tiles: dict[int, Tile] = {}
        for rows in TILES:
            if (best := _best(some, rows, clock or replayed)) is not None:
                tiles[rows], found.gains[f"{n} x {k}, {rows}"] = best
        for linear in alike:
            linear.tiles = tiles
    return found


def _best(linears: list[FewRowsLinear], rows: int, clock: Clock) -> tuple[Tile, float] | None:
    """The fastest right tile for ``rows`` rows and how many times as fast as cuBLAS it is; None: cuBLAS is."""
    weight = linears[0].weight
    x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
    want = F.linear(x, weight, linears[0].bias).float()

    def seconds(tile: Tile | None) -> float:
        def run() -> None:
            for linear in linears:
                if tile is None:
                    F.linear(x, linear.weight, linear.bias)
                else:
                    multiply(x, linear.weight, linear.bias, tile)

        return clock(run)

    plain, found = seconds(None), []
    for tile in TILES[rows]:
        if not tile.fits(weight):
            continue
        try:
            got = multiply(x, weight, linears[0].bias, tile).float()
            error = float((got - want).norm() / want.norm().clamp_min(1e-30))
            if not error <= TOLERANCE:  # a NaN fails, too
                log.warning("a tile for few rows is not used: %s differs from torch by %.2g", tile, error)
                continue
            found.append((seconds(tile), tile))
        except Exception as failure:  # no room for it in shared memory, say
            log.info("a tile for few rows is not used: %s: %s", tile, failure)
    if not found:
        return None
    taken, tile = min(found, key=lambda pair: pair[0])
    return (tile, plain / taken) if plain / taken >= MIN_GAIN else None


def replayed(run: Callable[[], object]) -> float:
    """Median seconds of a CUDA graph's replays, since launching from Python takes longer than the products."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(6):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken[1:])


def usable(device: torch.device) -> bool:
    """Whether products can be measured and replaced on ``device``."""
    return device.type == "cuda" and not INTERPRETED
