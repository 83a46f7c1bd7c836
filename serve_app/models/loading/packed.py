"""Checkpoints whose weights lie in fewer bits, read in part: each looks to transformers' loader like the numbers that
it stands for, or for experts like rows of codes, and what the loader asks for is all that is read.

transformers' own way unpacks whole weights before it cuts them, for which there is no room.

Formats: MXFP4 as gpt-oss has it, fp8 with scales for blocks as DeepSeek and Qwen do, and compressed-tensors'
``pack-quantized`` (github.com/vllm-project/compressed-tensors: whole numbers of four bits, eight in an int32, a scale
for each group of an output), as Kimi has it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.coded import GROUP, decode, group_bytes
from serve_app.models.loading.adapt import own_attention
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.mixtures.coded import coded_experts, hold_rows, takes_codes

FLOAT4, FLOAT8, WHOLE4 = "mxfp4", "fp8", "compressed-tensors"
FORMATS = (FLOAT4, FLOAT8, WHOLE4)
_SCALES = "_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_PACKED, _FACTORS, _SHAPE = "_packed", "_scale", "_shape"
_EXPERT = ".experts."
# Of activations, which stay as they are.
_IGNORED = (".activation_scale", ".input_scale")


def read_here(described: Any) -> bool:
    """Whether one process, too, reads such weights by this module; others are transformers' own affair."""
    if not isinstance(described, dict):
        return False
    method = described.get("quant_method")
    return method == FLOAT4 or (method == WHOLE4 and not _other_than_whole4(described))


def stays_coded(described: Any, device: torch.device) -> bool:
    """Whether experts may stay in four bits."""
    return read_here(described) and takes_codes(device)


def load_packed(
    model_class: Any, path: Path, described: dict[str, Any], *, dtype: torch.dtype, device: torch.device, codes: bool
) -> tuple[Any, dict[str, Any]]:
    """The whole model on the CPU, its packed weights as what they stand for, or with ``codes`` experts as rows of
    codes; and what transformers tells of loading it.
    """
    config = plain_config(model_class, path)

    def reads(model: Any, state: Any, files: Any, *more: Any, **named: Any) -> Any:
        held = coded_experts(model) if codes and stays_coded(described, device) else {}
        scale = scale_dtype(described, files) if held else None
        for experts in held.values():
            hold_rows(experts, scale)
        with ExitStack() as opened:
            tensors = open_files(files, described, dtype, opened, codes=bool(held))
            return model_class._load_pretrained_model(model, tensors, files, *more, **named)

    reading: Any = type(model_class.__name__, (model_class,), {"_load_pretrained_model": staticmethod(reads)})
    reading.__module__ = model_class.__module__
    module, info = reading.from_pretrained(
        path,
        config=config,
        attn_implementation=own_attention(model_class.__name__),
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    module.__class__ = model_class
    return module, info


def plain_config(model_class: Any, path: Path) -> Any:
    """The configuration without what it says of packed weights, of which transformers shall know nothing."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    for each in (config, config.get_text_config()):
        each.__dict__.pop("quantization_config", None)
    named = getattr(model_class, "config_class", None)
    return config if named is None or isinstance(config, named) else config.get_text_config()


def format_of(described: Any, path: Path, device: torch.device) -> str:
    """Of a ``quantization_config``. Raises :class:`UnsupportedModel` for one that can't be read in part."""
    method = described.get("quant_method") if isinstance(described, dict) else None
    if method not in FORMATS:
        raise UnsupportedModel(
            f"{path} holds weights packed as {method or 'something without a name'}, of which several ranks can't read "
            f"their parts; they can of {', '.join(FORMATS)}, and of plain weights"
        )
    if method == FLOAT8 and device.type != "cpu":
        raise UnsupportedModel(
            f"{path} holds weights in fp8, which several ranks read on CPUs alone, as bfloat16; use plain weights"
        )
    if method == WHOLE4 and (wrong := _other_than_whole4(described)):
        raise UnsupportedModel(
            f"{path} holds weights packed as {method} with {wrong}, of which several ranks can't read their parts; "
            "they can of symmetric whole numbers of 4 bits with a scale for each group (pack-quantized)"
        )
    return str(method)


def _other_than_whole4(described: dict[str, Any]) -> str:
    """What compressed-tensors has that is not read here; "" for nothing."""
    groups = described.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        told = group if isinstance(group, dict) else {}
        weights = told.get("weights")
        if not isinstance(weights, dict):
            return "no weights described"
        wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
        for key, value in wanted.items():
            if weights.get(key) != value:
                return f"{key}: {weights.get(key)}"
        for key in ("input_activations", "output_activations"):
            if told.get(key):
                return f"{key} in fewer bits"
        if (named := told.get("format") or described.get("format")) not in (None, "pack-quantized"):
            return f"format: {named}"
    return "" if groups else "no config_groups"


def open_files(
    files: list[str], described: dict[str, Any], dtype: torch.dtype, opened: ExitStack, *, codes: bool = False
) -> dict[str, Any]:
    """The tensors of a checkpoint by name, those that are packed as what they stand for in ``dtype``; with ``codes``
    experts as rows of codes (:meth:`serve_app.kernels.coded.Coded.of_rows`).
    """
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in files:
        handle = opened.enter_context(safe_open(file, framework="pt"))
        found |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    if described["quant_method"] == FLOAT4:
        return _experts(found, dtype, codes)
    if described["quant_method"] == WHOLE4:
        return _whole(found, dtype, codes)
    return _scaled(found, described.get("weight_block_size"), dtype)


def scale_dtype(described: dict[str, Any], files: list[str]) -> torch.dtype:
    """Of experts' scales. Raises :class:`UnsupportedModel` where groups are not of 32 columns."""
    if described["quant_method"] == FLOAT4:
        return torch.uint8
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if name.endswith(_PACKED) and _EXPERT in name:
                    scales = handle.get_slice(name.removesuffix(_PACKED) + _FACTORS)
                    columns, groups = handle.get_slice(name).get_shape()[-1] * 8, scales.get_shape()[-1]
                    if columns == groups * GROUP and scales.get_dtype() in ("BF16", "F16"):
                        return torch.bfloat16 if scales.get_dtype() == "BF16" else torch.float16
                    raise UnsupportedModel(f"{name} has {groups} scales of {scales.get_dtype()} for {columns} columns")
    raise UnsupportedModel("no expert is packed")


def _experts(tensors: dict[str, Any], dtype: torch.dtype, codes: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own = name.removesuffix(_BLOCKS)
        if own != name and own + _EXPONENTS in tensors:
            blocks, scales = tensor, tensors[own + _EXPONENTS]
            found[own] = Float4Rows(blocks, scales) if codes else Float4Experts(blocks, scales, dtype)
        elif name.removesuffix(_EXPONENTS) + _BLOCKS not in tensors:
            found[name] = tensor
    return found


def _whole(tensors: dict[str, Any], dtype: torch.dtype, codes: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own = name.removesuffix(_PACKED)
        if own != name:
            if own + _FACTORS not in tensors:
                raise UnsupportedModel(f"{name} has no {own}{_FACTORS}; fetch the weights again")
            kind: Any = WholeRows if codes and _EXPERT in name else WholeGroups
            found[own] = kind(name, tensor, tensors[own + _FACTORS], dtype)
        elif not any(name.removesuffix(end) + _PACKED in tensors for end in (_FACTORS, _SHAPE) if name.endswith(end)):
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
        experts, columns, rows = _slices(index, self.get_shape())
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        at = groups.start * GROUP
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

    def get_shape(self) -> list[int]:
        experts, n, groups, half = self.blocks.get_shape()
        return [experts, groups * (half + 1), n]

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        experts, columns, rows = _slices(index, self.get_shape())
        groups = _groups(columns, group_bytes(torch.uint8))
        own = self.blocks[experts, rows, groups], self.scales[experts, rows, groups].unsqueeze(-1)
        return torch.cat(own, -1).flatten(-2).transpose(1, 2)


@dataclass(slots=True, frozen=True)
class WholeGroups:
    """``codes`` int32 [n, k / 8], eight to a number, the lowest bits first, and ``scales`` [n, k / group]."""

    name: str
    codes: Any
    scales: Any
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        n, numbers = self.codes.get_shape()
        return [n, numbers * 8]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        (_, k), (_, count) = self.get_shape(), self.scales.get_shape()
        if k % count or k // count % 8:
            raise UnsupportedModel(f"{self.name} has {count} scales for {k} columns; fetch the weights again")
        rows, columns = _slices(index, self.get_shape())
        size = k // count
        groups = slice(columns.start // size, -(-columns.stop // size))
        codes = self.codes[rows, groups.start * size // 8 : groups.stop * size // 8].view(torch.uint8)
        found = decode(codes, self.scales[rows, groups], self.dtype, size)
        return found[:, columns.start - groups.start * size : columns.stop - groups.start * size]


@dataclass(slots=True, frozen=True)
class WholeRows:
    """The same as rows of codes, uint8 [n, k / 32 * 18]."""

    name: str
    codes: Any
    scales: Any
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        n, groups = self.scales.get_shape()
        return [n, groups * group_bytes(torch.bfloat16)]

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = _slices(index, self.get_shape())
        groups = _groups(columns, group_bytes(torch.bfloat16))
        codes = self.codes[rows, groups.start * GROUP // 8 : groups.stop * GROUP // 8].view(torch.uint8)
        scales = self.scales[rows, groups].unsqueeze(-1).view(torch.uint8)
        return torch.cat([codes.unflatten(-1, (-1, GROUP // 2)), scales], -1).flatten(-2)


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


def _groups(columns: slice, size: int) -> slice:
    """Groups of ``size`` bytes."""
    if columns.start % size or columns.stop % size:
        raise ValueError(f"bytes {columns.start} to {columns.stop} are no whole groups of {size}")
    return slice(columns.start // size, columns.stop // size)


def _slices(index: Any, shape: list[int]) -> list[slice]:
    """Start and stop in every dimension; ``index`` is what a file's own tensors take."""
    given = [] if index is ... else list(index) if isinstance(index, tuple) else [index]
    given += [slice(None)] * (len(shape) - len(given))
    return [slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True)]
