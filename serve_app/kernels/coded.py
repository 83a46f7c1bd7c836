"""Experts' weights in four bits as checkpoints have them: codes, and a scale for each 32 columns of an output.

Two forms are known. Of MXFP4 (Open Compute Project, *Microscaling Formats* v1.0) a code is a sign and one of 0, 0.5, 1,
1.5, 2, 3, 4, 6, and a scale a power of two. Of whole numbers (compressed-tensors' ``pack-quantized``, symmetric) a code
is a number from -8 to 7, plus 8, and a scale a number of 16 bits; a weight is their product, rounded to the scale's
dtype. Both keep the lower column of a byte in its low bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of exponents


@dataclass(slots=True, frozen=True)
class Coded:
    """Weights [E, n, k] that stand for numbers of ``dtype``. ``codes`` uint8 [E, n, k / 2], whose bytes of an output
    are neighbours; ``scales`` [E, n, k / 32], exponents in uint8 or numbers of 16 bits, which lie likewise.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of_rows(cls, rows: Tensor, scale: torch.dtype, dtype: torch.dtype) -> Coded:
        """Of ``rows`` uint8 [E, n, k / 32 * (16 + size of a scale)]: each group's codes, then its scale."""
        grouped = rows.unflatten(-1, (-1, group_bytes(scale)))
        codes = grouped[..., : GROUP // 2].flatten(-2).contiguous()
        scales = grouped[..., GROUP // 2 :].contiguous().view(scale).squeeze(-1)
        return cls(codes, scales, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> Tensor:
        """One expert's weight [n, k]."""
        return decode(self.codes[expert], self.scales[expert], self.dtype)

    def outputs(self, which: slice) -> Coded:
        """Some of the outputs, without a copy."""
        return Coded(self.codes[:, which], self.scales[:, which], self.dtype)


def group_bytes(scale: torch.dtype) -> int:
    """Of 32 codes and their scale."""
    return GROUP // 2 + scale.itemsize


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype, group: int = GROUP) -> Tensor:
    """What ``codes`` [..., k / 2] and ``scales`` [..., k / group] stand for: [..., k]."""
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).unflatten(-1, (-1, group))
    if scales.dtype is torch.uint8:
        values = codes.new_tensor(_FLOATS, dtype=torch.float32)[(each & 7).long()]
        values = torch.where(each > 7, -values, values)
        found = torch.ldexp(values, (scales.int() - _BIAS).unsqueeze(-1))
    else:
        found = (each.to(torch.int8) - 8).to(scales.dtype) * scales.unsqueeze(-1)
    return found.flatten(-2).to(dtype)
