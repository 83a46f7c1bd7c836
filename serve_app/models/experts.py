"""The experts of a mixture on CPUs: one after the other, on weights that oneDNN has laid out once.

transformers calls a registered function for the experts of every mixture, as it does for attention. Its own functions
read row-major weights of all experts on every call; with a few rows per step most of the time goes there. Here each
expert that a row has chosen is two linears on packed weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.kernels.linear.packed import PackedLinear, packing_available

NAME = "serve_app_experts"
log = logging.getLogger(__name__)
# Largest difference from F.linear, as a share of the largest output.
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


@dataclass(slots=True)
class PackedExperts:
    """Both linears of each expert of one layer."""

    up: list[PackedLinear]
    down: list[PackedLinear]


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows [T, H] through the experts ``top_k_index`` [T, K], weighted by ``top_k_weights`` [T, K] -> [T, H]."""
    packed: PackedExperts | None = getattr(module, "packed_experts", None)
    if packed is None:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    tokens, chosen = top_k_index.shape
    experts = top_k_index.reshape(-1)
    order = experts.argsort(stable=True)
    rows = hidden_states[order // chosen]
    out = torch.empty(tokens * chosen, hidden_states.shape[-1], dtype=hidden_states.dtype)
    at = 0
    for expert, count in enumerate(torch.bincount(experts, minlength=len(packed.up)).tolist()):
        if not count:
            continue
        inner = packed.up[expert](rows[at : at + count])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out[order[at : at + count]] = packed.down[expert](inner)
        at += count
    # As transformers has it: a sum over the choices of each row, in their order.
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def pack_experts(model: nn.Module) -> int:
    """Packs the experts of a model on the CPU and frees their own weights; returns how many. Modules of another form
    than transformers' experts stay as they are."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    done = 0
    for child in model.modules():
        if not _standard(child):
            continue
        packed = _pack(child)
        if packed is None:
            continue
        owner: Any = child
        owner.packed_experts = packed
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if isinstance(getattr(owner, name, None), nn.Parameter):
                setattr(owner, name, None)
        owner.config._experts_implementation_internal = NAME
        done += len(packed.up)
    return done


def _standard(module: Any) -> bool:
    """Whether the module is built by transformers' ``use_experts_implementation``, with nothing behind its experts."""
    if getattr(module, "has_post_expert_norm", True) or not hasattr(module, "_apply_gate"):
        return False
    weights = (getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None), module.down_proj)
    return all(
        isinstance(w, nn.Parameter) and w.ndim == 3 and w.device.type == "cpu" and packing_available(w.dtype)
        for w in weights
    )


@torch.inference_mode()
def _pack(module: Any) -> PackedExperts | None:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    try:
        up, down = (_linears(module, which) for which in (name, "down_proj"))
    except RuntimeError as error:
        log.warning("packing experts failed: %s", error)
        return None
    return PackedExperts(up, down) if up and down else None


def _linears(module: Any, name: str) -> list[PackedLinear]:
    """A linear for each expert; none where the first does not agree with the weights it was made of."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
    found = []
    for index, weight in enumerate(weights.transpose(1, 2) if module.is_transposed else weights):
        linear = PackedLinear(weight, biases[index])
        if index == 0:
            x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
            want = F.linear(x, weight.contiguous(), linear.bias).float()
            limit = _TOLERANCE[weight.dtype] * float(want.abs().max()) + 1e-30
            if not float((linear(x).float() - want).abs().max()) <= limit:
                return []
        found.append(linear)
    return found
