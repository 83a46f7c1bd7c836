"""Linears that take in what follows them, on weights in oneDNN's blocked format where that is there, and linears in
fewer bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.packed import packing_available
from serve_app.kernels.linear.panels import PanelLinears, PanelStore
from serve_app.kernels.linear.quantize import Quantized


def tail_rows(rows: int) -> int:
    """How many rows to put behind ``rows`` on a CPU. oneDNN compiles code and keeps scratch memory for every number of
    rows it sees, up to half a megabyte per linear; of few different numbers there is little, and it is there already.
    """
    return 0 if rows <= 32 else -rows % (8 if rows <= 128 else 16)


class FusedLinear(Linear):
    """A linear whose epilogue is SiLU, GELU, a product or a sum; packed where possible."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias, self.weight = bias, weight
        self._packed = False
        if weight.device.type == "cpu" and packing_available(weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
            self._packed = True
        self._unary = torch.ops.mkldnn._linear_pointwise.default if self._packed else None
        self._binary = torch.ops.mkldnn._linear_pointwise.binary if self._packed else None

    def __call__(self, x: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        if self._unary is not None:
            return self._unary(x, self.weight, self._bias, "none", [], "")
        return F.linear(x, self.weight, self._bias)

    def swish(self, x: Tensor, batch: Any = None) -> Tensor:
        if self._unary is not None:
            return self._unary(x, self.weight, self._bias, "swish", [], "")
        return super().swish(x, batch)

    def gelu(self, x: Tensor) -> Tensor:
        """``gelu(x @ W.T + b)``, the exact one."""
        if self._unary is not None:
            return self._unary(x, self.weight, self._bias, "gelu", [], "none")
        return F.gelu(self(x))

    def times(self, x: Tensor, other: Tensor, batch: Any = None) -> Tensor:
        if self._binary is not None:
            return self._binary(x, other, self.weight, self._bias, "mul")
        return super().times(x, other, batch)

    def plus(self, x: Tensor, other: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        if self._binary is not None:
            return self._binary(x, other, self.weight, self._bias, "add")
        return super().plus(x, other, batch, rows)


class QuantizedLinear(Linear):
    """A linear whose codes lie in ``store`` and are multiplied as they are."""

    def __init__(self, store: PanelStore, codes: Quantized, bias: Tensor | None) -> None:
        self.linears, self.dtype = PanelLinears(store, [codes], [bias]), torch.bfloat16

    def __call__(self, x: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        return self.linears(x)
