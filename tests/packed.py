"""Tiny checkpoints whose weights lie in fewer bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from tests import tiny

_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCK = 64


def float4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, k, n] as blocks [E, n, k / 32, 16], two codes a byte, and scales [E, n, k / 32], biased by 127."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = grouped.abs().amax(-1).log2().floor() - 2
    scaled = grouped / (2**exponent)[..., None]
    codes = (scaled.abs()[..., None] - _VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)


def float8(weight: torch.Tensor, size: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] as e4m3 codes, and a scale for each block of ``size`` rows and columns; the last may be smaller."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % size, 0, -n % size))
    blocks = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / 448
    codes = (blocks / scale).flatten(2, 3).flatten(0, 1)[:n, :k]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale[:, 0, :, 0].contiguous()


def float4_pairs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] as int8 [n, k / 2], two codes a byte, the first in the low bits, and powers of two [n, k / 32]."""
    blocks, scales = float4(weight.t()[None])
    return blocks[0].flatten(-2).view(torch.int8), scales[0].view(torch.float8_e8m0fnu)


def power_of_two_blocks(weight: torch.Tensor, size: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`float8`, with scales that are powers of two."""
    _, scale = float8(weight, size)
    scale = scale.log2().ceil().exp2()
    spread = scale.repeat_interleave(size, 0)[: len(weight)].repeat_interleave(size, 1)[:, : weight.shape[1]]
    return (weight / spread).to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def whole4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] as int32 [n, k / 8], eight numbers of four bits each, and a bfloat16 scale for each 32 columns.

    Scales have four digits, so that their products are bfloat16 without being rounded, which Triton's interpreter does
    in a way of its own.
    """
    grouped = weight.float().unflatten(1, (-1, 32))
    digits, exponent = torch.frexp((grouped.abs().amax(-1) / 7).clamp_min(1e-6))
    scale = torch.ldexp((digits * 16).ceil() / 16, exponent).bfloat16()
    codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    numbers = sum(codes[:, place::8] << 4 * place for place in range(8))
    return torch.where(numbers >= 1 << 31, numbers - (1 << 32), numbers).to(torch.int32), scale


def _write(path: Path, tensors: dict[str, torch.Tensor], described: dict[str, object]) -> Path:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    told["quantization_config"] = described
    (path / "config.json").write_text(json.dumps(told))
    return path


def write_float4(path: Path, **sizes: object) -> Path:
    """gpt-oss, as it is published."""
    tensors = load_file(tiny.write_checkpoint(path, "gpt_oss", **sizes) / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = float4(tensors.pop(name))
    return _write(path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


def write_float8(path: Path, family: str, *, size: int = BLOCK, **sizes: object) -> Path:
    """As DeepSeek and Qwen publish theirs: linears and experts, each with scales of its own, for blocks of ``size``."""
    tensors = load_file(tiny.write_checkpoint(path, family, **sizes) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = float8(tensors[name], size)
    left = ["lm_head", "model.embed_tokens"]
    described = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [size, size],
        "activation_scheme": "dynamic",
    }
    return _write(path, tensors, {**described, "modules_to_not_convert": left})


def write_deepseek_v4(path: Path, **sizes: object) -> Path:
    """As DeepSeek V4 is published: linears of attention and shared experts in fp8, routed experts in four bits, and
    scales that are powers of two beside them.
    """
    tensors = load_file(tiny.write_small(path, DeepseekV4ForCausalLM, **sizes) / "model.safetensors")
    linears = (".wq_a.weight", ".wq_b.weight", ".wkv.weight", ".wo_a.weight", ".wo_b.weight")
    for name in list(tensors):
        own = name.removesuffix(".weight")
        if ".experts." in name and own != name:
            tensors[name], tensors[f"{own}.scale"] = float4_pairs(tensors[name])
        elif ".shared_experts." in name or (name.endswith(linears) and ".compressor." not in name):
            tensors[name], tensors[f"{own}.scale"] = power_of_two_blocks(tensors[name])
    told = json.loads((path / "config.json").read_text()) | {"expert_dtype": "fp4"}
    (path / "config.json").write_text(json.dumps(told))
    described = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    return _write(path, tensors, {**described, "weight_block_size": [BLOCK, BLOCK]})


def write_whole4(path: Path, plain: Path, made: Callable[[], object]) -> Path:
    """As Kimi is published: each expert's linears in whole numbers of four bits. ``made`` writes a checkpoint to
    ``path``; ``plain`` gets the same with what its weights stand for.
    """
    made()
    shutil.copytree(path, plain, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    told = dict(tensors)
    for name in [name for name in tensors if ".experts." in name and name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        codes, scales = whole4(weight)
        tensors |= {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_shape": torch.tensor(weight.shape)}
        numbers = torch.stack([codes >> 4 * place & 15 for place in range(8)], -1).flatten(1) - 8
        told[name] = (numbers.bfloat16().unflatten(1, (-1, 32)) * scales[..., None]).flatten(1).to(weight.dtype)
    save_file(told, plain / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return _write(path, tensors, {**described, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]})
