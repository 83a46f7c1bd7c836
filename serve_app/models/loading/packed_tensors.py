"""Packed tensors of a checkpoint, each of which looks like the numbers that it stands for, or like rows of codes: what
is asked of it is all that is read. Indices are those that a file's own tensors take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.coded import FLOAT4, Form, decode, to_rows
from serve_app.models.loading.folder import UnsupportedModel


@dataclass(slots=True, frozen=True)
class Float4Experts:
    """Weights [E, k, n] as gpt-oss has them: ``blocks`` uint8 [E, n, k / 32, 16], two values a byte, and exponents
    ``scales`` uint8 [E, n, k / 32].
    """

    blocks: Any
    scales: Any
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        experts, n, groups, half = self.blocks.get_shape()
        return [experts, groups * half * 2, n]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        experts, columns, rows = _slices(index, self.get_shape())
        groups = slice(columns.start // FLOAT4.group, -(-columns.stop // FLOAT4.group))
        at = groups.start * FLOAT4.group
        sizes = [each.stop - each.start for each in (experts, columns, rows)]
        out = torch.empty(sizes, dtype=self.dtype)
        for place, expert in enumerate(range(experts.start, experts.stop)):  # unpacking takes ten times their memory
            one = slice(expert, expert + 1)
            codes, scales = self.blocks[one, rows, groups].flatten(-2), self.scales[one, rows, groups]
            found = decode(codes, scales, self.dtype)[0].t()
            out[place] = found[columns.start - at : columns.stop - at]
        return out


@dataclass(slots=True, frozen=True)
class Float4Rows:
    """The same as rows of codes, uint8 [E, k / 32 * 17, n]."""

    blocks: Any
    scales: Any
    form: Form

    def get_shape(self) -> list[int]:
        experts, n, groups, _ = self.blocks.get_shape()
        return [experts, groups * self.form.bytes, n]

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        experts, columns, rows = _slices(index, self.get_shape())
        groups = _groups(columns, self.form)
        return to_rows(self.blocks[experts, rows, groups], self.scales[experts, rows, groups]).transpose(1, 2)


@dataclass(slots=True, frozen=True)
class PackedGroups:
    """``codes`` of four bits [n, k / values], so many ``values`` to a whole number, the lowest bits first, and
    ``scales`` [n, k / group].
    """

    name: str
    codes: Any
    scales: Any
    dtype: torch.dtype
    values: int = 8

    def get_shape(self) -> list[int]:
        n, numbers = self.codes.get_shape()
        return [n, numbers * self.values]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        (_, k), (_, count) = self.get_shape(), self.scales.get_shape()
        if k % count or k // count % self.values:
            raise UnsupportedModel(f"{self.name} has {count} scales for {k} columns; fetch the weights again")
        rows, columns = _slices(index, self.get_shape())
        size = k // count
        groups = slice(columns.start // size, -(-columns.stop // size))
        each = size // self.values
        codes = self.codes[rows, groups.start * each : groups.stop * each].view(torch.uint8)
        found = decode(codes, _exponents(self.scales[rows, groups]), self.dtype, size)
        return found[:, columns.start - groups.start * size : columns.stop - groups.start * size]


@dataclass(slots=True, frozen=True)
class PackedRows:
    """The same as rows of codes, uint8 [n, k / 32 * bytes of a group]."""

    codes: Any
    scales: Any
    form: Form
    values: int = 8

    def get_shape(self) -> list[int]:
        n, groups = self.scales.get_shape()
        return [n, groups * self.form.bytes]

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = _slices(index, self.get_shape())
        groups = _groups(columns, self.form)
        numbers = self.form.group // self.values
        codes = self.codes[rows, groups.start * numbers : groups.stop * numbers].view(torch.uint8)
        return to_rows(codes.unflatten(-1, (-1, self.form.size)), _exponents(self.scales[rows, groups]))


@dataclass(slots=True, frozen=True)
class ScaledBlocks:
    """``codes`` e4m3 [..., n, k] with a scale for each block of them: ``scales`` [..., n / rows, k / columns], rounded
    up, or one for all.
    """

    name: str
    codes: Any
    scales: Any
    block: Any  # rows and columns, where the configuration says so
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.codes.get_shape())

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        shape, grid = self.get_shape(), list(self.scales.get_shape())
        own = _slices(index, shape)
        values = self.codes[tuple(own)].float()
        if len(grid) < 2:
            return (values * _numbers(self.scales[...])).to(self.dtype)
        cells = list(own[:-2])
        sizes = self._block(shape, grid)
        for dim, size in zip((-2, -1), sizes, strict=True):
            cells.append(slice(own[dim].start // size, -(-own[dim].stop // size)))
        factors = _numbers(self.scales[tuple(cells)])
        for dim, size in zip((-2, -1), sizes, strict=True):
            factors = factors.repeat_interleave(size, dim)
            factors = factors.narrow(dim, own[dim].start % size, own[dim].stop - own[dim].start)
        return (values * factors).to(self.dtype)

    def _block(self, shape: list[int], grid: list[int]) -> list[int]:
        """Rows and columns that share a scale."""
        if len(grid) == len(shape) and isinstance(self.block, list) and len(self.block) == 2:
            named = [int(size) for size in self.block]
            if [-(-n // size) for n, size in zip(shape[-2:], named, strict=True)] == grid[-2:]:
                return named
        even = [n % cells for n, cells in zip(shape[-2:], grid[-2:], strict=True)] == [0, 0]
        if len(grid) != len(shape) or not even:
            raise UnsupportedModel(
                f"{self.name} is {shape} and has scales {grid}, which blocks of {self.block} do not make; fetch the "
                "weights again"
            )
        return [n // cells for n, cells in zip(shape[-2:], grid[-2:], strict=True)]


@dataclass(slots=True, frozen=True)
class ScaledRows:
    """The same as rows of codes, uint8 [..., n, k / 128 * 132]."""

    blocks: ScaledBlocks
    form: Form

    def get_shape(self) -> list[int]:
        *more, k = self.blocks.get_shape()
        return [*more, k // self.form.group * self.form.bytes]

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        *outer, rows, columns = _slices(index, self.get_shape())
        groups, size = _groups(columns, self.form), self.form.group
        codes = self.blocks.codes[(*outer, rows, slice(groups.start * size, groups.stop * size))].view(torch.uint8)
        cells = slice(rows.start // size, -(-rows.stop // size))
        scales = _numbers(self.blocks.scales[(*outer, cells, groups)]).repeat_interleave(size, -2)
        scales = scales.narrow(-2, rows.start % size, rows.stop - rows.start)
        return to_rows(codes.unflatten(-1, (-1, size)), scales)


def _exponents(scales: Tensor) -> Tensor:
    """Powers of two as bytes of their exponents, as :func:`decode` takes them; other scales as they are."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def _numbers(scales: Tensor) -> Tensor:
    """float32, of scales of which some checkpoints have the exponents alone."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def _groups(columns: slice, form: Form) -> slice:
    """Groups that bytes of rows are."""
    if columns.start % form.bytes or columns.stop % form.bytes:
        raise ValueError(f"bytes {columns.start} to {columns.stop} are no whole groups of {form.bytes}")
    return slice(columns.start // form.bytes, columns.stop // form.bytes)


def _slices(index: Any, shape: list[int]) -> list[slice]:
    """Start and stop in every dimension; ``index`` is what a file's own tensors take."""
    given = [] if index is ... else list(index) if isinstance(index, tuple) else [index]
    given += [slice(None)] * (len(shape) - len(given))
    return [slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True)]
