"""Drawing from truncated distributions without sorting them, and without a word to the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def draw_truncated(
    probs: Tensor, done: Tensor, chosen: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, points: Tensor
) -> None:  # fmt: skip
    """Overwrites ``chosen`` [S] int64 in the rows that are not ``done`` [S] bool with a token of ``probs`` [S, V]
    float32.

    A row keeps its ``top_k`` most likely tokens (int64; V: all), of these the fewest whose mass reaches ``top_p`` of
    theirs, of these the ones of at least ``min_p`` times the best; tokens as likely as the last one stay as well. The
    token is where the cumulative sum of what is kept, in the order of token ids, passes ``points`` (float64, 0..1). The
    bounds are found by bisection over the bits of a float: as numbers they order non-negative floats alike.
    """
    rows, vocab = probs.shape
    _draw_truncated[(rows,)](
        probs.contiguous(), done, chosen, top_k.flatten(), top_p.flatten(), min_p.flatten(), points.flatten(),
        vocab, BLOCK=min(4096, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _draw_truncated(probs, done, chosen, top_k, top_p, min_p, points, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(done + row) != 0:
        return
    values = probs + row * vocab
    column = tl.arange(0, BLOCK)
    best = 0.0
    for start in range(0, vocab, BLOCK):
        tile = tl.load(values + start + column, mask=start + column < vocab, other=0.0)
        best = tl.maximum(best, tl.max(tile, 0))
    most = tl.cast(best, tl.int32, bitcast=True)

    # The k-th largest value: the largest bound that k tokens reach.
    wanted = tl.load(top_k + row).to(tl.float32)
    low = most * 0
    high = most
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        bound = middle.to(tl.float32, bitcast=True)
        count = 0.0
        for start in range(0, vocab, BLOCK):
            tile = tl.load(values + start + column, mask=start + column < vocab, other=-1.0)
            count += tl.sum(tl.where(tile >= bound, 1.0, 0.0), 0)
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    floor = low

    # The largest bound, not below that, above which the wanted share of the mass lies.
    kept = 0.0
    bound = floor.to(tl.float32, bitcast=True)
    for start in range(0, vocab, BLOCK):
        tile = tl.load(values + start + column, mask=start + column < vocab, other=-1.0)
        kept += tl.sum(tl.where(tile >= bound, tile, 0.0), 0)
    share = tl.load(top_p + row) * kept
    high = most
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        bound = middle.to(tl.float32, bitcast=True)
        mass = 0.0
        for start in range(0, vocab, BLOCK):
            tile = tl.load(values + start + column, mask=start + column < vocab, other=-1.0)
            mass += tl.sum(tl.where(tile >= bound, tile, 0.0), 0)
        enough = mass >= share
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    bound = tl.maximum(low.to(tl.float32, bitcast=True), tl.load(min_p + row) * best)

    kept = 0.0
    for start in range(0, vocab, BLOCK):
        tile = tl.load(values + start + column, mask=start + column < vocab, other=-1.0)
        kept += tl.sum(tl.where(tile >= bound, tile, 0.0), 0)
    point = tl.load(points + row).to(tl.float32) * kept
    before = 0.0
    found = vocab
    last = 0
    for start in range(0, vocab, BLOCK):
        tile = tl.load(values + start + column, mask=start + column < vocab, other=-1.0)
        tile = tl.where((tile >= bound) & (tile > 0), tile, 0.0)
        passed = (before + tl.cumsum(tile, 0) > point) & (tile > 0)
        found = tl.minimum(found, tl.min(tl.where(passed, start + column, vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(tile > 0, start + column, 0), 0))
        before += tl.sum(tile, 0)
    # Rounding may leave the point at the very end.
    tl.store(chosen + row, tl.where(found < vocab, found, last).to(tl.int64))
