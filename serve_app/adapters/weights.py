"""An adapter as numbers: what PEFT writes for LoRA (arXiv 2106.09685), read into one delta per linear.

The configuration is read by :mod:`serve_app.adapters.config`, the weights by safetensors. Whatever PEFT would compute
with and this does not is refused by name, so that an adapter is served exactly or not at all.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from serve_app.adapters.check import UNUSED, read_header
from serve_app.adapters.config import AdapterConfig, AdapterRefused, read_config
from serve_app.adapters.mixture import JOINED, Owners, Target, require_all, target_of

PREFIX = "base_model.model."
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tensors lie in the file's own bytes, which nobody writes to.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


@dataclass(slots=True)
class Delta:
    """What an adapter adds to one linear: ``scale * (x @ a.T) @ b.T``.

    ``a`` [r, k] and ``b`` [n, r] are float32, or bfloat16 where the file has that; PEFT computes with both as float32.
    Of E experts they are [E, r, k] and [E, n, r].
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(slots=True)
class AdapterWeights:
    """``deltas`` by the name of the linear as in transformers' ``named_modules``, or of the weight as in its
    ``named_parameters`` for experts and routers; ``rank`` is the largest.
    """

    rank: int
    deltas: dict[str, Delta]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for delta in self.deltas.values() for part in (delta.a, delta.b))


def read_adapter(
    config: bytes, weights: bytes | Path, owners: Owners | None = None, experts: int = 0
) -> AdapterWeights:
    """Reads ``adapter_config.json`` and ``adapter_model.safetensors``. ``owners``: modules of the model that are no
    linears and whose weights take adapters; ``experts``: how many each of its mixtures has. Raises
    :class:`AdapterRefused`, whose text says what to do.
    """
    told = read_config(config)
    tensors = _tensors(weights.read_bytes() if isinstance(weights, Path) else weights)
    adapted = sorted({name for key in tensors if (name := _module(key))})
    targets = {name: target_of(name, told, owners or {}) for name in adapted}
    require_all(targets.values(), {target.name: experts for target in targets.values()})
    deltas: dict[str, Delta] = {}
    parts: dict[str, list[tuple[Target, Delta]]] = {}
    for name, target in targets.items():
        a, b = (_tensor(tensors, f"{PREFIX}{name}.{part}.weight") for part in ("lora_A", "lora_B"))
        rank = told.rank_of(target.key)
        count = experts if target.owned and target.expert < 0 and not target.name.endswith(".weight") else 1
        if a.shape[0] != count * rank or b.shape[1] != count * rank:
            raise AdapterRefused(
                f"{name} has A {list(a.shape)} and B {list(b.shape)}, and adapter_config.json says rank {rank} for it; "
                "write the adapter with save_pretrained, which writes both"
            )
        if not target.owned or target.expert >= 0:
            told.require_target(name)
        if count > 1:  # the rows of A are an expert's ranks one after the other, the columns of B a rank's experts
            a = a.view(count, rank, -1)
            b = b.view(len(b), rank, count).permute(2, 0, 1).contiguous()
        delta = Delta(a, b, told.scale_of(target.key))
        if target.expert < 0:
            deltas[target.name] = delta
        else:
            parts.setdefault(target.name, []).append((target, delta))
    deltas |= {name: _joined(name, of, experts, told) for name, of in parts.items()}
    if not deltas:
        raise AdapterRefused("the adapter has no weights; write it with save_pretrained after training")
    return AdapterWeights(max(delta.rank for delta in deltas.values()), deltas)


def _joined(name: str, parts: list[tuple[Target, Delta]], experts: int, told: AdapterConfig) -> Delta:
    """One delta of all experts, of one for each linear of each: gates and ups stand side by side, each with its own
    ranks.
    """
    halves = sorted({target.half for target, _ in parts})
    by = {(target.expert, target.half): delta for target, delta in parts}
    if len({(delta.a.shape, delta.b.shape, delta.scale) for _, delta in parts}) > 1:
        raise AdapterRefused(f"the adapters of {name}'s experts have several ranks or scales; train them with one")
    first = parts[0][1]
    (rank, k), n, wide = first.a.shape, len(first.b), name.endswith(JOINED)
    a = torch.zeros(experts, rank * len(halves), k, dtype=first.a.dtype)
    b = torch.zeros(experts, n * (1 + wide), rank * len(halves), dtype=first.b.dtype)
    for (expert, half), delta in by.items():
        lanes = slice(rank * halves.index(half), rank * (halves.index(half) + 1))
        a[expert, lanes] = delta.a
        b[expert, n * max(0, half) : n * (max(0, half) + 1), lanes] = delta.b
    # PEFT says twice rank and alpha for what it joins, which is another scale where that goes by the rank's root.
    return Delta(a, b, first.scale * (math.sqrt(2) if told.rslora and len(halves) == 2 else 1))


def _tensors(data: bytes) -> dict[str, Tensor]:
    """Without a copy, which would take as long as packing does."""
    header = read_header(io.BytesIO(data), len(data))
    found = {}
    for name, told in header.items():
        if 0 in told.shape:
            raise AdapterRefused(f"{name} is {list(told.shape)}; an adapter's matrices have two sizes, none of them 0")
        found[name] = _numbers(data, told.dtype, told.start, told.end).view(told.shape)
    # All at once where they have one dtype: hundreds of small ones take longer.
    kinds, starts = {told.dtype for told in header.values()}, [told.start for told in header.values()]
    if len(kinds) != 1 or not _finite(_numbers(data, kinds.pop(), min(starts), len(data))):
        for name, tensor in found.items():
            if not _finite(tensor):
                raise AdapterRefused(f"{name} has numbers that are not finite; train the adapter again")
    return found


def _numbers(data: bytes, dtype: str, start: int, end: int) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start).view(_DTYPES[dtype])


def _finite(numbers: Tensor) -> bool:
    """What is not finite is the largest or the smallest, or makes both none; ``isfinite`` takes ten times as long."""
    return all(math.isfinite(bound) for bound in torch.stack(numbers.aminmax()).tolist())


def _module(key: str) -> str:
    """The module that an A or B belongs to, "" for what is not used. Refuses everything else."""
    for part in (".lora_A.weight", ".lora_B.weight"):
        if key.startswith(PREFIX) and key.endswith(part):
            return key[len(PREFIX) : -len(part)]
    if key.endswith(UNUSED):
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
    if tensor.ndim != 2:
        raise AdapterRefused(f"{key} is {list(tensor.shape)}; an adapter's matrices have two sizes, none of them 0")
    return tensor.float() if tensor.dtype is torch.float16 else tensor
