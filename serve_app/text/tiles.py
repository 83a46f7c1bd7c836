"""How a picture is cut into square tiles, which gateways and workers work out alike."""

from __future__ import annotations

import math

import numpy as np


def canvas(width: int, height: int, side: int, most: int, *, largest: bool = False) -> tuple[int, int]:
    """Rows and columns of tiles of ``side`` pixels, at most ``most`` of them, that a picture is laid on.

    Of all canvases that it fits on without being made smaller the one that it has to be enlarged least for, or with
    ``largest`` most; where there is none, the one on which it stays largest. Of several the smallest.
    """
    shapes = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    sides = np.array(shapes, np.float32) * np.float32(side)
    scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
    larger = scales[scales >= 1]
    chosen = scales.max() if not len(larger) or largest else larger.min()
    return min((shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen), key=math.prod)
