"""Where a request's tokens stand for a model that turns queries and keys by three numbers: time, row and column.

Text has the same number three times. A picture's tokens share a time and have their row and column in its grid, and the
text behind goes on after the picture's longer side (section 2.1 of arXiv 2409.12191)::

    tokens    text text | picture of 2 rows, 3 columns | text text
    time        0    1     2   2   2   2   2   2           5    6
    row         0    1     2   2   2   3   3   3           5    6
    column      0    1     2   3   4   2   3   4           5    6

So they follow from a token's number and the grids before it, whatever is computed in which step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.request import EmbeddedSpan

if TYPE_CHECKING:
    from serve_app.engine.step import Scheduled


def place(spans: Sequence[EmbeddedSpan], start: int, count: int) -> tuple[NDArray[np.int64], bool]:
    """Time, row and column [3, count] of a request's tokens from ``start`` on, and whether any token's differ."""
    found = np.tile(np.arange(start, start + count, dtype=np.int64), (3, 1))
    moved, apart = 0, False
    for span in spans:
        if span.grid is None or span.start >= start + count:
            continue
        rows, columns = span.grid
        first, last = max(span.start, start), min(span.end, start + count)
        if first < last:
            at, own = np.arange(first, last) - span.start, slice(first - start, last - start)
            found[:, own] = span.start + moved
            found[1, own] += at // columns
            found[2, own] += at % columns
            apart = True
        after = max(rows, columns) - span.count
        found[:, max(0, span.end - start) :] += after
        moved += after
    return found, apart


def place_batch(
    scheduled: Sequence[Scheduled], query_start: NDArray[np.int32], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """What tokens with these ``numbers`` in their requests are turned by: one number each [T] and, where some have
    three that differ, three [3, T]."""
    if not any(span.grid is not None for s in scheduled for span in s.request.embedded):
        return numbers, None
    axes, apart = np.tile(numbers, (3, 1)), False
    for begin, s in zip(query_start.tolist(), scheduled, strict=False):
        if s.request.embedded:
            axes[:, begin : begin + s.count], differ = place(s.request.embedded, s.start, s.count)
            apart = apart or differ
    return np.ascontiguousarray(axes[0]), axes if apart else None
