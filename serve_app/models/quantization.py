"""Weight quantisation of a loaded model: its linears and experts keep the rounded values and carry the codes they came
from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from serve_app.kernels.linear.quantize import Quantized, obstacle, quantize

BITS = {"int8": 8, "int4": 4}
NAMES = ("none", *BITS)


def quantize_linears(model: nn.Module, name: str) -> str:
    """Rounds the weights of all ``nn.Linear`` to ``name`` (``int8``, ``int4``) and says what was done.

    The output head keeps 8 bits in any case: its errors go straight into the choice of tokens. Embeddings stay, a tied
    head gets a weight of its own. So do routers, whose errors go into the choice of experts. A module's codes are its
    attribute ``quantized`` (:class:`serve_app.kernels.linear.quantize.Quantized`), those of experts ``expert_codes``.
    """
    done, left = 0, 0
    experts = sum(_quantize_experts(module, BITS[name]) for module in model.modules())
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        if obstacle(module.weight) is not None:
            left += 1
            continue
        codes = quantize(module.weight.detach(), 8 if module is head else BITS[name])
        values = codes.dequantize(module.weight.dtype).to(module.weight.device)
        module.weight = nn.Parameter(values, requires_grad=False)
        module.quantized = codes  # type: ignore[assignment]
        done += 1
    of_experts = f" and {experts} experts" if experts else ""
    return f"{name}, {done} linears{of_experts}" + (
        f"; {left} left as they are (columns are no multiple of 64)" if left else ""
    )


def codes_of(module: nn.Module) -> list:
    """The codes of a linear that :func:`quantize_linears` has rounded, else nothing."""
    found = getattr(module, "quantized", None)
    return [] if found is None or isinstance(found, torch.Tensor) else [found]


def is_quantized(model: nn.Module) -> bool:
    """Whether any module carries codes."""
    return any(codes_of(module) or getattr(module, "expert_codes", None) for module in model.modules())


def rounds_experts(module: Any) -> bool:
    """Whether a module is transformers' common one of experts, whose weights are rounded; Llama 4 has another."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def _quantize_experts(module: Any, bits: int) -> int:
    """How many experts transformers' module of them has, if their weights can be rounded; 0 for any other module."""
    if not rounds_experts(module):
        return 0
    names = [name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3]
    own = {name: getattr(module, name).data for name in names}
    if module.is_transposed:
        own = {name: weights.transpose(1, 2) for name, weights in own.items()}
    if any(obstacle(experts[0]) is not None for experts in own.values()):
        return 0  # before any of them is rounded
    found: dict[str, list[Quantized]] = {}
    for name, experts in own.items():
        found[name] = []
        for expert in experts:
            codes = quantize(expert, bits)
            expert.copy_(codes.dequantize(expert.dtype))
            found[name].append(codes)
    module.expert_codes = found
    return len(getattr(module, names[0])) if names else 0


def codes_of_experts(module: Any, name: str) -> list[Quantized]:
    """Of each expert's weight ``name``, where :func:`quantize_linears` has rounded them, else nothing."""
    return (getattr(module, "expert_codes", None) or {}).get(name, [])
