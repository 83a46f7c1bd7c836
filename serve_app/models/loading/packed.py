"""Checkpoints whose weights lie in fewer bits, read in part: each looks to transformers' loader like the numbers that
it stands for, or for experts like rows of codes, and what the loader asks for is all that is read.

transformers' own way unpacks whole weights before it cuts them, for which there is no room.

Formats: MXFP4 as gpt-oss has it, fp8 with scales for blocks as DeepSeek and Qwen do, beside which DeepSeek V4 has its
experts in MXFP4's codes, two in a byte, and compressed-tensors' ``pack-quantized``
(github.com/vllm-project/compressed-tensors: whole numbers of four bits, eight in an int32, a scale for each group of an
output), as Kimi has it.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from serve_app.kernels import coded
from serve_app.kernels.coded import Form
from serve_app.models.loading.adapt import reading
from serve_app.models.loading.folder import UnsupportedModel, packing_of
from serve_app.models.loading.packed_tensors import (
    Float4Experts,
    Float4Rows,
    PackedGroups,
    PackedRows,
    ScaledBlocks,
    ScaledRows,
)
from serve_app.models.loading.slices import Tally, open_slices
from serve_app.models.mixtures.coded import coded_experts, hold_rows, takes_codes

FLOAT4, FLOAT8, WHOLE4 = "mxfp4", "fp8", "compressed-tensors"
FORMATS = (FLOAT4, FLOAT8, WHOLE4)
_SCALES, _WEIGHT, _SCALE = "_scale_inv", ".weight", ".scale"
_PAIRS = ("I8", "U8")  # two codes of four bits in a byte
_POWERS = ("F8_E8M0", "U8")  # exponents
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_PACKED, _FACTORS, _SHAPE = "_packed", "_scale", "_shape"
_EXPERT = ".experts."
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
# Of activations, which stay as they are.
_IGNORED = (".activation_scale", ".input_scale")


def read_here(config: dict[str, Any], device: torch.device) -> bool:
    """Whether one process, too, reads such weights by this module; others are transformers' own affair."""
    described = packing_of(config)
    if not isinstance(described, dict):
        return False
    method = described.get("quant_method")
    if method == FLOAT8:  # for the sake of experts, which transformers' kernels are not for
        text = config.get("text_config") or config
        if "fp4" in (config.get("expert_dtype"), described.get("expert_dtype")):
            return True
        return any((text.get(name) or 0) > 1 for name in _COUNTS) and takes_codes(device)
    return method == FLOAT4 or (method == WHOLE4 and not _other_than_whole4(described))


def form_of(described: dict[str, Any], files: list[str], device: torch.device) -> Form | None:
    """The form of experts that stay in few bits; None where they are unpacked."""
    method = described.get("quant_method")
    if not takes_codes(device) or not _all_packed(files, str(method)):
        return None
    if method == FLOAT4:
        return coded.FLOAT4
    if method == FLOAT8:
        kinds = _kinds_of_experts(files)
        if kinds and kinds <= set(_PAIRS):
            return coded.FLOAT4
        whole = described.get("weight_block_size") == [128, 128] and not kinds & set(_PAIRS)
        return coded.FLOAT8 if whole else None
    return _form_of_whole4(files) if method == WHOLE4 else None


def _all_packed(files: list[str], method: str) -> bool:
    """Whether every expert's weight is packed: layers may be left out."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as handle:
            names.update(handle.keys())
    if method == FLOAT4:
        return not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names)
    plain = [name for name in names if _EXPERT in name and name.endswith(_WEIGHT)]
    return not plain if method == WHOLE4 else all(_scales_of(name, names) for name in plain)


def _scales_of(name: str, names: Container[str]) -> str:
    """The name of a weight's scales; "" where it has none."""
    own = [name + _SCALES] + ([name.removesuffix(_WEIGHT) + _SCALE] if name.endswith(_WEIGHT) else [])
    return next((each for each in own if each in names), "")


def _kinds_of_experts(files: list[str]) -> set[str]:
    """As what experts' weights are stored that have scales, each expert's or all of them in one."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            found |= {name: handle.get_slice(name).get_dtype() for name in handle.keys() if _EXPERT in name}  # noqa: SIM118
    return {kind for name, kind in found.items() if _scales_of(name, found)}


def _form_of_whole4(files: list[str]) -> Form | None:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                if name.endswith(_PACKED) and _EXPERT in name:
                    scales = handle.get_slice(name.removesuffix(_PACKED) + _FACTORS)
                    columns, groups = handle.get_slice(name).get_shape()[-1] * 8, scales.get_shape()[-1]
                    dtype = _HALVES.get(scales.get_dtype())
                    return coded.whole4(dtype) if dtype is not None and columns == groups * 32 else None
    return None


def load_packed(
    model_class: Any, path: Path, described: dict[str, Any], *, dtype: torch.dtype, device: torch.device, codes: bool
) -> tuple[Any, dict[str, Any]]:
    """The whole model on the CPU, its packed weights as what they stand for, or with ``codes`` experts as rows of
    codes; and what transformers tells of loading it.
    """
    config = plain_config(model_class, path)

    def reads(model: Any, state: Any, files: Any, *more: Any, **named: Any) -> Any:
        form = form_of(described, files, device) if codes else None
        held = [] if form is None else [(experts, form) for experts in coded_experts(model, form).values()]
        for experts, each in held:
            hold_rows(experts, each)
        with ExitStack() as opened:
            tensors = open_files(files, described, dtype, opened, form if held else None)
            return model_class._load_pretrained_model(model, tensors, files, *more, **named)

    reader: Any = type(model_class.__name__, (model_class,), {"_load_pretrained_model": staticmethod(reads)})
    reader.__module__ = model_class.__module__
    module, info = reader.from_pretrained(path, config=config, **reading(model_class, dtype))
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


def format_of(described: Any, path: Path) -> str:
    """Of a ``quantization_config``. Raises :class:`UnsupportedModel` for one that can't be read in part."""
    method = described.get("quant_method") if isinstance(described, dict) else None
    if method not in FORMATS:
        raise UnsupportedModel(
            f"{path} holds weights packed as {method or 'something without a name'}, of which several ranks can't read "
            f"their parts; they can of {', '.join(FORMATS)}, and of plain weights"
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
        if weights.get("actorder") not in (None, False, "weight", "static"):
            return f"actorder: {weights['actorder']}"
        for key in ("input_activations", "output_activations"):
            if told.get(key):
                return f"{key} in fewer bits"
        if (named := told.get("format") or described.get("format")) not in (None, "pack-quantized"):
            return f"format: {named}"
    for key in ("transform_config", "sparsity_config", "kv_cache_scheme"):
        more = described.get(key)
        if more and not (isinstance(more, dict) and more.get("format") == "dense"):
            return key
    return "" if groups else "no config_groups"


def open_files(
    files: list[str], described: dict[str, Any], dtype: torch.dtype, opened: ExitStack, form: Form | None = None,
    tally: Tally | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The tensors of a checkpoint by name, those that are packed as what they stand for in ``dtype``; with a ``form``
    experts as rows of codes (:meth:`serve_app.kernels.coded.Coded.of_rows`). ``tally`` counts what is read of files.
    """
    found = open_slices(files, opened, tally)
    if described["quant_method"] == FLOAT4:
        return _experts(found, dtype, form)
    if described["quant_method"] == WHOLE4:
        return _whole(found, dtype, form)
    return _scaled(found, described.get("weight_block_size"), dtype, form)


def _experts(tensors: dict[str, Any], dtype: torch.dtype, form: Form | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own = name.removesuffix(_BLOCKS)
        if own != name and own + _EXPONENTS in tensors:
            blocks, scales = tensor, tensors[own + _EXPONENTS]
            found[own] = Float4Rows(blocks, scales, form) if form else Float4Experts(blocks, scales, dtype)
        elif name.removesuffix(_EXPONENTS) + _BLOCKS not in tensors:
            found[name] = tensor
    return found


def _whole(tensors: dict[str, Any], dtype: torch.dtype, form: Form | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if order := next((name for name in tensors if name.endswith("_g_idx")), None):
        raise UnsupportedModel(f"{order} says which columns share a scale, which is not read yet; use other weights")
    for name, tensor in tensors.items():
        own = name.removesuffix(_PACKED)
        if own != name:
            if own + _FACTORS not in tensors:
                raise UnsupportedModel(f"{name} has no {own}{_FACTORS}; fetch the weights again")
            scales = tensors[own + _FACTORS]
            if form is not None and _EXPERT in name:
                found[own] = PackedRows(tensor, scales, form)
            else:
                found[own] = PackedGroups(name, tensor, scales, dtype)
        elif not any(name.removesuffix(end) + _PACKED in tensors for end in (_FACTORS, _SHAPE) if name.endswith(end)):
            found[name] = tensor
    return found


def _scaled(tensors: dict[str, Any], block: Any, dtype: torch.dtype, form: Form | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    used = set()
    for name, tensor in tensors.items():
        kind, own = tensor.get_dtype(), _scales_of(name, tensors)
        if not own or (own.endswith(_SCALE) and not (kind.startswith("F") and kind[1] in "48") and kind not in _PAIRS):
            continue
        used.add(own)
        coded_here = form is not None and _EXPERT in name
        if kind == "F4" or (kind in _PAIRS and tensors[own].get_dtype() not in _POWERS):
            raise UnsupportedModel(
                f"{name} is stored as {kind} with scales as {tensors[own].get_dtype()}; weights of four bits are read "
                f"from bytes ({', '.join(_PAIRS)}), with powers of two for scales ({', '.join(_POWERS)})"
            )
        if kind in _PAIRS:
            rows = PackedRows(tensor, tensors[own], form, 2) if form is not None and coded_here else None
            found[name] = rows or PackedGroups(name, tensor, tensors[own], dtype, 2)
        else:
            blocks = ScaledBlocks(name, tensor, tensors[own], block, dtype)
            found[name] = ScaledRows(blocks, form) if form is not None and coded_here else blocks
    for name, tensor in tensors.items():
        if name in found or name in used or name.endswith((_SCALES, *_IGNORED)):
            continue
        if tensor.get_dtype().startswith("F8"):
            raise UnsupportedModel(f"{name} is in fp8, and {name}{_SCALES} is not there; fetch the weights again")
        found[name] = tensor
    return found
