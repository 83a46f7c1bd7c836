"""What stands in the place of a matrix product: a linear that sees the batch whose rows it multiplies.

Everything that differs by request or by device plugs in here: an adapter's delta, a sharded weight, float8 codes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """``x @ W.T + b``: [N, k] -> [N, n] in the weight's dtype.

    ``batch`` is the step's ``engine.step.Batch``. ``rows`` are those of its rows that ``x`` holds; None: all of them,
    from the first on, and behind them there may be rows of zeros, whose results nobody reads. What follows the product
    in a layer can be taken in by a subclass that does both in one call. ``dtype``: of what goes in and comes out, where
    that is known.
    """

    dtype: torch.dtype | None = None

    def __call__(self, x: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def idle(self, batch: Any) -> bool:
        """Whether ``batch`` gets just what the module gives in whose place this stands."""
        return False

    def swish(self, x: Tensor, batch: Any) -> Tensor:
        """``silu(x @ W.T + b)``."""
        return F.silu(self(x, batch))

    def times(self, x: Tensor, other: Tensor, batch: Any) -> Tensor:
        """``(x @ W.T + b) * other``."""
        return self(x, batch) * other

    def plus(self, x: Tensor, other: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        """``(x @ W.T + b) + other``."""
        return self(x, batch, rows) + other


class PlainLinear(Linear):
    """A linear by torch, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, self.bias)
