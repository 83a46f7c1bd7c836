"""Which layers a stage has. Loading and planning cut alike."""

from __future__ import annotations


def stages(costs: list[int], count: int, ends: tuple[int, int]) -> list[tuple[int, int]]:
    """Layers [first, last) of each stage so that the fullest holds least. ``costs``: of each layer; ``ends``: of what
    stands before the first and behind the last one.
    """
    sums = [0]
    for each in costs:
        sums.append(sums[-1] + each)

    def held(begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (ends[0] if begin == 0 else 0) + (ends[1] if end == len(costs) else 0)

    layers = len(costs)
    best: list[list[tuple[int, int]]] = [[(held(0, end), 0) for end in range(layers + 1)]]
    for stage in range(1, count):
        row = [(0, 0)] * (stage + 1)
        for end in range(stage + 1, layers + 1):
            row.append(min((max(best[-1][cut][0], held(cut, end)), cut) for cut in range(stage, end)))
        best.append(row)
    found, end = [], layers
    for stage in range(count - 1, -1, -1):
        begin = best[stage][end][1]
        found.append((begin, end))
        end = begin
    return found[::-1]
