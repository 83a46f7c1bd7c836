"""Weights in 8 or 4 bits, per output and group of 64 columns.

``value = scale * code + offset``: 8 bits are symmetric (codes -127 to 127, no offset), 4 bits asymmetric (codes 0 to
15; the offset is the least value). Scales and offsets are bfloat16. The C++ pass (``cpu/quantized.h``) multiplies
the codes with activations in 8 bits; elsewhere :meth:`Quantized.dequantize` gives a weight for the usual kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP = 64
PANEL = 64
BITS = (8, 4)
# Shares of a group's range that are tried as the range of 4-bit codes: clipping may cost less than coarse steps.
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(slots=True)
class Quantized:
    """``codes`` uint8 [n, k] (8 bits: plus 128); ``scale`` and ``offset`` bfloat16 [n, k / 64], no offset for 8."""

    bits: int
    codes: Tensor
    scale: Tensor
    offset: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """[n, k]"""
        return self.codes.shape

    @property
    def row_bytes(self) -> int:
        """Bytes per output once packed."""
        k = self.codes.shape[1]
        return k * self.bits // 8 + k // GROUP * (2 if self.offset is None else 4)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values [n, k]."""
        n, k = self.codes.shape
        grouped = self.codes.view(n, k // GROUP, GROUP).float() - (128 if self.offset is None else 0)
        grouped *= self.scale.float().unsqueeze(2)
        if self.offset is not None:
            grouped += self.offset.float().unsqueeze(2)
        return grouped.view(n, k).to(dtype)

    def part(self, rows: slice, columns: slice = slice(None)) -> Quantized:
        """Some of the outputs, and of the inputs whole groups."""
        start, stop = columns.start, columns.stop
        groups = slice(None if start is None else start // GROUP, None if stop is None else stop // GROUP)
        offset = None if self.offset is None else self.offset[rows, groups]
        return Quantized(self.bits, self.codes[rows, columns].contiguous(), self.scale[rows, groups], offset)

    @staticmethod
    def stack(parts: list[Quantized]) -> Quantized:
        """Weights of one input, one under the other."""
        if len(parts) == 1:
            return parts[0]
        offsets = [p.offset for p in parts if p.offset is not None]
        return Quantized(
            parts[0].bits,
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scale for p in parts]),
            torch.cat(offsets) if offsets else None,
        )


def obstacle(weight: Tensor) -> str | None:
    """Why ``weight`` [n, k] stays as it is, or None."""
    return None if weight.shape[1] % GROUP == 0 else f"{weight.shape[1]} columns are no multiple of {GROUP}"


@torch.inference_mode()
def quantize(weight: Tensor, bits: int) -> Quantized:
    """``weight`` [n, k], any float dtype, rounded to ``bits`` (8 or 4); k must be a multiple of 64."""
    if bits not in BITS or obstacle(weight) is not None:
        raise ValueError(f"{bits} bits of a weight {tuple(weight.shape)}: 8 or 4 bits and groups of {GROUP} columns")
    n, k = weight.shape
    grouped = weight.float().view(n, k // GROUP, GROUP)
    if bits == 8:
        scale = (grouped.abs().amax(2) / 127).bfloat16()
        codes = _round(grouped, scale, torch.zeros_like(scale), -127, 127) + 128
        return Quantized(8, codes.to(torch.uint8).view(n, k), scale, None)
    low, high = grouped.amin(2), grouped.amax(2)
    middle, half = (low + high) / 2, (high - low) / 2
    best = torch.full_like(low, float("inf"))
    scale = offset = torch.zeros_like(low).bfloat16()
    for shrink in _SHRINK:
        tried_offset, tried_scale = (middle - shrink * half).bfloat16(), (shrink * half * 2 / 15).bfloat16()
        values = _round(grouped, tried_scale, tried_offset, 0, 15) * tried_scale.float().unsqueeze(2)
        error = (values + tried_offset.float().unsqueeze(2) - grouped).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scale, offset = torch.where(better, tried_scale, scale), torch.where(better, tried_offset, offset)
    codes = _round(grouped, scale, offset, 0, 15)
    return Quantized(4, codes.to(torch.uint8).view(n, k), scale, offset)


def _round(grouped: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale.float())
    return ((grouped - offset.float().unsqueeze(2)) * inverse.unsqueeze(2)).round_().clamp_(low, high)


def pack_panels(weight: Quantized, order: np.ndarray) -> Tensor:
    """The layout of ``cpu/quantized.h`` as uint8 [bytes]; packed row r is row ``order[r]``, -1 stands for zeros."""
    index = torch.from_numpy(order)
    pad = index < 0
    rows, groups = index.clamp(min=0), weight.codes.shape[1] // GROUP
    codes = weight.codes[rows]
    scale = weight.scale[rows].masked_fill(pad.unsqueeze(1), 0)
    panels = len(order) // PANEL
    scales = _per_panel(scale, panels)
    # Four neighbouring columns move as one word.
    words = codes.view(torch.int32).view(panels, PANEL, groups, GROUP // 4)
    if weight.offset is None:
        packed = words.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(panels, groups, -1)
        return torch.cat([packed, scales], 2).view(-1)
    offset = weight.offset[rows].masked_fill(pad.unsqueeze(1), 0)
    # Codes are below 16: a shift by 4 stays within each byte.
    halves = words[..., 0::2] | (words[..., 1::2] << 4)
    packed = halves.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(panels, groups, -1)
    return torch.cat([packed, scales, _per_panel(offset, panels)], 2).view(-1)


def _per_panel(values: Tensor, panels: int) -> Tensor:
    """[rows, groups] bfloat16 as bytes [panels, groups, 2 * 64]."""
    return values.view(panels, PANEL, -1).permute(0, 2, 1).contiguous().view(torch.uint8)
