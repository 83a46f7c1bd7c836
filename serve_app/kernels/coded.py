"""Experts' weights in fewer bits as checkpoints have them: codes, and scales that neighbouring columns of an output
share.

In four bits a byte has the lower of two columns in its low bits. Of MXFP4 (Open Compute Project, *Microscaling Formats*
v1.0) a code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a scale a power of two. Of whole numbers
(compressed-tensors' ``pack-quantized``, symmetric) a code is a number from -8 to 7, plus 8, and a scale a number of 16
bits; a weight is their product, rounded to the scale's dtype. In eight bits (DeepSeek's and Qwen's checkpoints) a code
is a float8_e4m3fn, and a scale a number that blocks of 128 rows and columns share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of exponents


@dataclass(slots=True, frozen=True)
class Form:
    """``group`` columns share a scale of dtype ``scale``, and take ``size`` bytes of codes."""

    group: int
    size: int
    scale: torch.dtype

    @property
    def bytes(self) -> int:
        """Of a group and its scale."""
        return self.size + self.scale.itemsize


FLOAT4 = Form(32, 16, torch.uint8)
FLOAT8 = Form(128, 128, torch.float32)


def whole4(scale: torch.dtype) -> Form:
    """Whole numbers with scales of that dtype, of 16 bits."""
    return Form(32, 16, scale)


@dataclass(slots=True, frozen=True)
class Coded:
    """Weights [E, n, k] that stand for numbers of ``dtype``. ``codes`` uint8 [E, n, k / 2 or k], whose bytes of an
    output are neighbours, as its ``scales`` [E, n, k / group] are: exponents in uint8, or numbers.
    """

    codes: Tensor
    scales: Tensor
    form: Form
    dtype: torch.dtype

    @classmethod
    def of_rows(cls, rows: Tensor, form: Form, dtype: torch.dtype) -> Coded:
        """Of ``rows`` uint8 [E, n, k / group * bytes of a group]: each group's codes, then its scale."""
        grouped = rows.unflatten(-1, (-1, form.bytes))
        codes = grouped[..., : form.size].flatten(-2).contiguous()
        scales = grouped[..., form.size :].contiguous().view(form.scale).squeeze(-1)
        return cls(codes, scales, form, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.scales.shape[-1] * self.form.group)

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
        decode_as = decode8 if self.form.size == self.form.group else decode
        return decode_as(self.codes[expert], self.scales[expert], self.dtype)

    def outputs(self, which: slice) -> Coded:
        """Some of the outputs, without a copy."""
        return Coded(self.codes[:, which], self.scales[:, which], self.form, self.dtype)


def to_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """What :meth:`Coded.of_rows` takes, of ``codes`` uint8 [..., groups, bytes] and ``scales`` [..., groups]."""
    return torch.cat([codes, scales.unsqueeze(-1).view(torch.uint8)], -1).flatten(-2)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype, group: int = 32) -> Tensor:
    """What ``codes`` [..., k / 2] of four bits and ``scales`` [..., k / group] stand for: [..., k]."""
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).unflatten(-1, (-1, group))
    if scales.dtype is torch.uint8:
        values = codes.new_tensor(_FLOATS, dtype=torch.float32)[(each & 7).long()]
        values = torch.where(each > 7, -values, values)
        found = torch.ldexp(values, (scales.int() - _BIAS).unsqueeze(-1))
    else:
        found = (each.to(torch.int8) - 8).to(scales.dtype) * scales.unsqueeze(-1)
    return found.flatten(-2).to(dtype)


def decode8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``codes`` [..., k] of eight bits and ``scales`` [..., k / 128] stand for: [..., k]."""
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, FLOAT8.group))
    return (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)
