"""Experts whose rows are weighed before them and not behind them (Llama 4).

transformers computes every expert for every row there, with zeros for those that a row has not chosen. Here rows go to
the experts that they have chosen.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.kernels.linear.packed import packing_available
from serve_app.kernels.linear.panels import PanelStore
from serve_app.models.mixtures.experts import ExpertWeights, PackedExperts, pack_products

log = logging.getLogger(__name__)
_CHILDREN = {"experts", "router", "shared_expert"}
_WEIGHTS = ("gate_up_proj", "down_proj")
# The root mean square of what a block's own result may differ by, as a share of it.
_ALLOWED = {torch.bfloat16: 0.02, torch.float32: 1e-4}


class ScaledExperts:
    """Stands in the place of the block's forward function."""

    def __init__(self, block: Any, packed: PackedExperts) -> None:
        self._block, self._packed = block, packed

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., H] -> [T, H], and the router's logits."""
        block, packed = self._block, self._packed
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = block.router(x)
        weights, index = scores.topk(block.top_k, -1)  # those that are not chosen have 0
        chosen = index.reshape(-1)
        gate, up = packed.up((x[:, None] * weights[..., None]).flatten(0, 1), chosen).chunk(2, -1)
        routed = packed.down(up * block.experts.act_fn(gate), chosen)
        return block.shared_expert(x) + routed.view(*index.shape, -1).sum(1), logits


@torch.inference_mode()
def pack_scaled(model: nn.Module, store: PanelStore | None = None) -> int:
    """As :func:`~serve_app.models.mixtures.experts.pack_experts`, for blocks of this form."""
    done = 0
    for module in model.modules():
        if not _is_scaled(module):
            continue
        block: Any = module
        experts = block.experts
        up, down = (getattr(experts, name).detach().transpose(1, 2) for name in _WEIGHTS)
        none = [None] * len(up)
        packed = pack_products(ExpertWeights(up, none), ExpertWeights(down, none), store)
        if packed is None:
            continue
        forward = ScaledExperts(block, packed)
        x = torch.randn(3, up.shape[2], generator=torch.Generator().manual_seed(0)).to(up.dtype)
        wanted, found = block(x)[0].float(), forward(x)[0].float()
        if not (found - wanted).square().mean().sqrt() <= _ALLOWED[up.dtype] * wanted.square().mean().sqrt():
            log.warning("%s computes something else than packed experts, and stays", type(block).__name__)
            continue
        block.forward = forward
        for name in _WEIGHTS:
            setattr(experts, name, None)
        done += packed.count
    return done


def _is_scaled(block: Any) -> bool:
    if {name for name, _ in block.named_children()} != _CHILDREN or not isinstance(block.router, nn.Linear):
        return False
    weights = [getattr(block.experts, name, None) for name in _WEIGHTS]
    return hasattr(block, "top_k") and hasattr(block.experts, "act_fn") and all(
        isinstance(w, nn.Parameter) and w.ndim == 3 and w.device.type == "cpu" and packing_available(w.dtype)
        for w in weights
    )  # fmt: skip
