"""An adapter as numbers: what PEFT writes for LoRA (arXiv 2106.09685), read into one delta per linear.

The configuration is read by :mod:`serve_app.adapters.config`, the weights by safetensors. Whatever PEFT would compute
with and this does not is refused by name, so that an adapter is served exactly or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from serve_app.adapters.config import AdapterRefused, read_config

PREFIX = "base_model.model."
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Delta:
    """What an adapter adds to one linear: ``scale * (x @ a.T) @ b.T``.

    ``a`` [r, k] and ``b`` [n, r] are float32, or bfloat16 where the file has that; PEFT computes with both as float32.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(slots=True)
class AdapterWeights:
    """``deltas`` by the name of the module as in transformers' ``named_modules``; ``rank`` is the largest."""

    rank: int
    deltas: dict[str, Delta]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for delta in self.deltas.values() for part in (delta.a, delta.b))


def read_adapter(config: bytes, weights: bytes | Path) -> AdapterWeights:
    """Reads ``adapter_config.json`` and ``adapter_model.safetensors``. Raises :class:`AdapterRefused`, whose text says
    what to do.
    """
    told = read_config(config)
    tensors = _tensors(weights)
    deltas = {}
    # PEFT puts the base's own weight beside the adapter of an output head.
    adapted = {name for key in tensors if (name := _module(key))}
    for name in sorted(adapted):
        a, b = (_tensor(tensors, f"{PREFIX}{name}.{part}.weight") for part in ("lora_A", "lora_B"))
        rank = told.rank_of(name)
        if a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterRefused(
                f"{name} has A {list(a.shape)} and B {list(b.shape)}, and adapter_config.json says rank {rank} for it; "
                "write the adapter with save_pretrained, which writes both"
            )
        told.require_target(name)
        deltas[name] = Delta(a, b, told.scale_of(name))
    if not deltas:
        raise AdapterRefused("the adapter has no weights; write it with save_pretrained after training")
    return AdapterWeights(max(delta.rank for delta in deltas.values()), deltas)


def _tensors(weights: bytes | Path) -> dict[str, Tensor]:
    try:
        if isinstance(weights, bytes):
            return load(weights)
        with safe_open(weights, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise AdapterRefused(f"adapter_model.safetensors can't be read ({error}); upload the file again") from error


def _module(key: str) -> str:
    """The module that an A or B belongs to, "" for a copy of the base's own weight. Refuses everything else."""
    for part in (".lora_A.weight", ".lora_B.weight"):
        if key.startswith(PREFIX) and key.endswith(part):
            return key[len(PREFIX) : -len(part)]
    if key.endswith(".base_layer.weight"):
        return ""
    for mark, what in (
        ("lora_magnitude_vector", "DoRA"),
        ("lora_embedding", "an adapter of embeddings"),
        (".bias", "a bias"),
    ):
        if mark in key:
            raise AdapterRefused(f"{key} belongs to {what}, which is not served; train without it")
    raise AdapterRefused(f"{key} is no A or B of a linear; train linears only (no modules_to_save), and save with PEFT")


def _tensor(tensors: dict[str, Tensor], key: str) -> Tensor:
    tensor = tensors.get(key)
    if tensor is None:
        raise AdapterRefused(f"adapter_model.safetensors lacks {key}; upload the whole file")
    if tensor.dtype not in _DTYPES:
        raise AdapterRefused(f"{key} is {tensor.dtype}; save the adapter in float32, bfloat16 or float16")
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise AdapterRefused(f"{key} is {list(tensor.shape)}; an adapter's matrices have two sizes, none of them 0")
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterRefused(f"{key} has numbers that are not finite; train the adapter again")
    return tensor.float() if tensor.dtype is torch.float16 else tensor
