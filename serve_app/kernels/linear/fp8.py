"""Linears in float8 (e4m3: 4 bits of exponent, 3 of mantissa, largest 448): half the bytes of bfloat16.

Weights have one scale per output, activations one per token, taken as they come (the format: arXiv 2209.05433). On GPUs
of compute capability 8.9 and up torch's ``_scaled_mm`` multiplies the codes; elsewhere the same codes are multiplied
in float32, which gives the same values slowly, so that the cost in quality can be measured anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.linear.base import Linear

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [n, k] and scales float32 [n, 1] of ``x`` [n, k]: ``x`` is about ``codes * scale``."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def obstacle(weight: Tensor) -> str | None:
    """Why ``weight`` [n, k] can't be multiplied in float8 on its device, or None."""
    if any(size % 16 for size in weight.shape):
        return "sizes must be multiples of 16"
    if weight.is_cuda and weight.dtype != torch.bfloat16:
        return "the product's dtype must be bfloat16"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return "the GPU has no float8 products (compute capability 8.9)"
    return None


class Fp8Linear(Linear):
    """``x @ weight.T + bias`` with both rounded to e4m3; in and out are of the weight's former dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, quantize: QuantizeRows = quantize_rows) -> None:
        if (reason := obstacle(weight)) is not None:
            raise ValueError(f"a weight of {tuple(weight.shape)} in float8: {reason}")
        self.quantize, self.bias = quantize, bias
        self.codes, scale = quantize_rows(weight)
        self.scale = scale.T.contiguous()  # [1, n]

    def __call__(self, x: Tensor, batch: Any = None, rows: Tensor | None = None) -> Tensor:
        codes, scale = self.quantize(x)
        if not x.is_cuda:
            product = (codes.float() @ self.codes.float().T) * scale * self.scale
            return (product if self.bias is None else product + self.bias.float()).to(x.dtype)
        return torch._scaled_mm(
            codes, self.codes.T, scale_a=scale, scale_b=self.scale, bias=self.bias, out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip
