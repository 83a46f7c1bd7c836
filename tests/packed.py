"""Tiny checkpoints whose weights lie in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] as e4m3 codes, and a scale for each block of 64 rows and columns, of which the last may be smaller."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / 448
    codes = (blocks / scale).flatten(2, 3).flatten(0, 1)[:n, :k]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale[:, 0, :, 0].contiguous()


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


def write_float8(path: Path, family: str, **sizes: object) -> Path:
    """As DeepSeek and Qwen publish theirs: linears and experts, each with scales of its own."""
    tensors = load_file(tiny.write_checkpoint(path, family, **sizes) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = float8(tensors[name])
    left = ["lm_head", "model.embed_tokens"]
    described = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
    return _write(path, tensors, {**described, "modules_to_not_convert": left})
