"""Adapters as PEFT writes them, made of random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors.torch import save

PREFIX = "base_model.model."


def config(**fields: object) -> bytes:
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, "modules_to_save": None}
    return json.dumps(told | fields).encode()


def weights(
    shapes: Mapping[str, tuple[int, int]], rank: int = 4, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> bytes:
    """A file with A and B for modules of ``shapes`` [n, k]; as large as weights are, so that they change answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (n, k) in shapes.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, k, generator=generator).to(dtype) * 0.1
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(n, rank, generator=generator).to(dtype) * 0.1
    return save(tensors)
