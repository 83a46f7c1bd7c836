"""bfloat16 weights in 12 bits without loss, for the C++ pass (``cpu/compact.h`` has the layout).

A decode step is as fast as memory gives its weights, and the exponents of trained weights are few: DFloat11 (arXiv
2504.11651) counts 2.6 bits of information in the 8 of an exponent and packs them by entropy, for GPUs. Here sign and
the upper 7 bits of the exponent get 4 bits, a fixed length that a few instructions unpack.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from serve_app.kernels.library import native
from serve_app.kernels.linear.quantize import PANEL

BLOCK_COLUMNS = 16
TABLE_BYTES = 16
# A weight with more exceptions than this is not made smaller.
MOST_EXCEPTIONS = 0.01


class Compact:
    """What stands beside a linear's panels: see ``Exceptions`` in ``cpu/compact.h``."""

    def __init__(self, bases: np.ndarray, counts: np.ndarray) -> None:
        """``bases`` uint8 [panels], ``counts`` int32 [panels * blocks] as the survey gives them."""
        self.bases = bases
        self.starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=self.starts[1:])
        self.tables = np.zeros((len(bases), TABLE_BYTES), np.uint8)
        self.values = np.zeros(max(1, self.exceptions), np.uint32)

    @property
    def exceptions(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.tables.nbytes + self.values.nbytes

    def addresses(self) -> tuple[int, int, int]:
        """Of tables, starts and values."""
        return self.tables.ctypes.data, self.starts.ctypes.data, self.values.ctypes.data


def compact_bytes(rows: int, k: int) -> int:
    """Of the panels of a weight with ``rows`` packed rows (a multiple of 64) and ``k`` columns."""
    return rows * k * 3 // 2


def survey(library: native.Library, source: Tensor, order: np.ndarray, threads: int) -> Compact | None:
    """Looks at ``source`` [n, k] bfloat16, packed row r being its row ``order[r]`` (-1: zeros); None if 12 bits hold
    too few of its values.
    """
    panels, k = len(order) // PANEL, source.shape[1]
    bases = np.zeros(panels, np.uint8)
    counts = np.zeros(panels * -(-k // BLOCK_COLUMNS), np.int32)
    library.survey_compact(
        source.data_ptr(), order.ctypes.data, len(order), k, threads, bases.ctypes.data, counts.ctypes.data
    )
    return Compact(bases, counts) if counts.sum() <= MOST_EXCEPTIONS * source.numel() else None


def pack(library: native.Library, source: Tensor, order: np.ndarray, threads: int, to: Compact, at: int) -> None:
    """Writes the panels to the address ``at`` and fills ``to``."""
    tables, starts, values = to.addresses()
    library.pack_compact(
        source.data_ptr(), order.ctypes.data, len(order), source.shape[1], threads, to.bases.ctypes.data, starts, at,
        tables, values,
    )  # fmt: skip
