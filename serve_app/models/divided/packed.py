"""Checkpoints whose weights lie in fewer bits, read in part: each looks to transformers' loader like the numbers that
it stands for, and what the loader asks for is all that is read.

transformers' own way unpacks whole weights before it cuts them, for which ranks have no room.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.models.loading.folder import UnsupportedModel

FORMATS = ("mxfp4", "fp8")
# Values of four bits that share a scale.
_GROUP = 32
_SCALES = "_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
# Of activations, which stay as they are.
_IGNORED = (".activation_scale", ".input_scale")


def format_of(described: Any, path: Path, device: torch.device) -> str:
    """Of a ``quantization_config``. Raises :class:`UnsupportedModel` for one that ranks can't read."""
    method = described.get("quant_method") if isinstance(described, dict) else None
    if method not in FORMATS:
        raise UnsupportedModel(
            f"{path} holds weights packed as {method or 'something without a name'}, of which several ranks can't read "
            f"their parts; they can of {' and '.join(FORMATS)}, and of plain weights"
        )
    if method == "fp8" and device.type != "cpu":
        raise UnsupportedModel(
            f"{path} holds weights in fp8, which several ranks read on CPUs alone, as bfloat16; use plain weights"
        )
    return str(method)


def open_files(files: list[str], described: dict[str, Any], dtype: torch.dtype, opened: ExitStack) -> dict[str, Any]:
    """The tensors of a checkpoint by name, those that are packed as what they stand for in ``dtype``."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in files:
        handle = opened.enter_context(safe_open(file, framework="pt"))
        found |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    if described["quant_method"] == "mxfp4":
        return _experts(found, dtype)
    return _scaled(found, described.get("weight_block_size"), dtype)


def _experts(tensors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own = name.removesuffix(_BLOCKS)
        if own != name and own + _EXPONENTS in tensors:
            found[own] = Float4Experts(tensor, tensors[own + _EXPONENTS], dtype)
        elif name.removesuffix(_EXPONENTS) + _BLOCKS not in tensors:
            found[name] = tensor
    return found


def _scaled(tensors: dict[str, Any], block: Any, dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name + _SCALES in tensors:
            found[name] = ScaledBlocks(name, tensor, tensors[name + _SCALES], block, dtype)
        elif tensor.get_dtype().startswith("F8"):
            raise UnsupportedModel(f"{name} is in fp8, and {name}{_SCALES} is not there; fetch the weights again")
        elif not name.endswith((_SCALES, *_IGNORED)):
            found[name] = tensor
    return found


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
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        experts, columns, rows = _slices(index, self.get_shape())
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        at = groups.start * _GROUP
        sizes = [each.stop - each.start for each in (experts, columns, rows)]
        out = torch.empty(sizes, dtype=self.dtype)
        for place, expert in enumerate(range(experts.start, experts.stop)):  # unpacking takes ten times their memory
            one = slice(expert, expert + 1)
            packed = self.blocks[one, rows, groups], self.scales[one, rows, groups]
            out[place] = convert_moe_packed_tensors(*packed, dtype=self.dtype)[
                0, columns.start - at : columns.stop - at
            ]
        return out


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
            return (values * self.scales[...].float()).to(self.dtype)
        cells = list(own[:-2])
        sizes = self._block(shape, grid)
        for dim, size in zip((-2, -1), sizes, strict=True):
            cells.append(slice(own[dim].start // size, -(-own[dim].stop // size)))
        factors = self.scales[tuple(cells)].float()
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


def _slices(index: Any, shape: list[int]) -> list[slice]:
    """Start and stop in every dimension; ``index`` is what a file's own tensors take."""
    given = [] if index is ... else list(index) if isinstance(index, tuple) else [index]
    given += [slice(None)] * (len(shape) - len(given))
    return [slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True)]
