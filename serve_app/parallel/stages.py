"""Which layers a stage has. Loading and planning cut alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NEVER = 1 << 62


def stages(costs: list[int], count: int, ends: tuple[int, int], follows: Sequence[bool] = ()) -> list[tuple[int, int]]:
    """Layers [first, last) of each stage so that the fullest holds least. ``costs``: of each layer; ``ends``: of what
    stands before the first and behind the last one. A layer that ``follows`` the one before it is in its stage. Raises
    ValueError where they do not make so many stages.
    """
    begins = [at for at in range(1, len(costs)) if not (follows and follows[at])]
    if count > len(begins) + 1:
        what = ": some take over the keys that the one before them has chosen" if any(follows) else ""
        raise ValueError(f"{len(costs)} layers do not make {count} stages{what}")
    sums = [0]
    for each in costs:
        sums.append(sums[-1] + each)

    def held(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (ends[0] if begin == 0 else 0) + (ends[1] if end == len(costs) else 0)

    layers = len(costs)
    best: list[list[tuple[int, int]]] = [[(held(0, end), 0) for end in range(layers + 1)]]
    for stage in range(1, count):
        row = [(NEVER, 0)] * (stage + 1)
        for end in range(stage + 1, layers + 1):
            ways = ((max(best[-1][cut][0], held(cut, end)), cut) for cut in begins if stage <= cut < end)
            row.append(min(ways, default=(NEVER, 0)))
        best.append(row)
    found, end = [], layers
    for stage in range(count - 1, -1, -1):
        begin = best[stage][end][1]
        found.append((begin, end))
        end = begin
    return found[::-1]


def following(text: Any) -> list[bool]:
    """Which layers of a model take over the keys that the one before them has chosen (GLM 5); [] where none do.
    ``text``: its configuration."""
    kinds = getattr(text, "indexer_types", None) or []
    return [kind == "shared" for kind in kinds] if "shared" in kinds else []
