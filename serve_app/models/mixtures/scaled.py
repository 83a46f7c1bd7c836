"""Experts whose rows are weighed before them and not behind them (Llama 4).

transformers computes every expert for every row there, with zeros for those that a row has not chosen. Here a block
hands its experts the rows and what these have chosen, as other mixtures do::

    transformers    router -> scores [T, E] -> E copies of all rows, scaled -> all experts
    here            router -> scores [T, E] -> k best of a row -> rows, scaled -> those experts

So a row costs the experts that it has chosen, and ranks may hold some of the experts whole.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.kernels.experts import Experts
from serve_app.kernels.linear.packed import packing_available
from serve_app.kernels.linear.panels import PanelStore
from serve_app.kernels.mixture import Gate
from serve_app.models.mixtures.experts import ExpertWeights, PackedExperts, pack_products

log = logging.getLogger(__name__)
_CHILDREN = {"experts", "router", "shared_expert"}
_WEIGHTS = ("gate_up_proj", "down_proj")
# The root mean square of what a block's own result may differ by, as a share of it.
_ALLOWED = {torch.bfloat16: 0.02, torch.float16: 0.02, torch.float32: 1e-4}


class RoutedBlock:
    """Stands in the place of the block's forward function. It calls its experts as a module, so that what ranks do
    behind them is done.
    """

    def __init__(self, block: Any) -> None:
        self._block = block

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., H] -> [T, H], and the router's logits."""
        block = self._block
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = block.router(x)
        weights, index = scores.topk(block.top_k, -1)  # those that are not chosen have 0
        return block.shared_expert(x) + block.experts(x, index, weights), logits


class ScaledExperts:
    """Stands in the place of the experts' forward function."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows [T, H], times ``top_k_weights`` [T, K], through the experts ``top_k_index`` [T, K] -> [T, H]."""
        experts, chosen = self._experts, top_k_index.reshape(-1)
        rows = (hidden_states[:, None] * top_k_weights[..., None]).flatten(0, 1)
        packed: PackedExperts | None = getattr(experts, "packed_experts", None)
        if packed is not None:
            gate, up = packed.up(rows, chosen).chunk(2, -1)
            out = packed.down(up * experts.act_fn(gate), chosen)
        else:
            out = _mixed(experts, rows, chosen)
        return out.view(*top_k_index.shape, out.shape[-1]).sum(1)


def _mixed(experts: Any, rows: Tensor, chosen: Tensor) -> Tensor:
    """By the module's own weights, which are views here: [P, H]."""
    from serve_app.kernels.gpu.backend import operators

    half = experts.gate_up_proj.shape[2] // 2
    gate_up, down = (getattr(experts, name).transpose(1, 2) for name in _WEIGHTS)
    stacked = Experts(gate_up[:, :half], gate_up[:, half:], down, None, None, None, Gate())
    whole = torch.ones(len(rows), 1, device=rows.device)
    return operators(rows.device).mix_experts(rows, chosen[:, None], whole, stacked)


def scaled_blocks(model: nn.Module) -> dict[str, Any]:
    """The blocks of this form, by name; ``model`` may be without memory."""
    return {name: module for name, module in model.named_modules() if _is_scaled(module)}


def route_rows(block: Any) -> None:
    """Has a block of this form take its experts by their numbers. A rank has its share of them, or of their columns;
    that they compute the same the check at load sees.
    """
    block.forward = RoutedBlock(block)
    block.experts.forward = ScaledExperts(block.experts)


@torch.inference_mode()
def route_scaled(model: nn.Module) -> int:
    """Has all blocks of this form that compute the same so take their experts by their numbers, and returns how many
    experts there are.
    """
    done = 0
    for block in scaled_blocks(model).values():
        if not _is_routed(block) and not _route(block):
            continue
        done += len(block.experts.gate_up_proj)
    return done


@torch.inference_mode()
def pack_scaled(model: nn.Module, store: PanelStore | None = None) -> int:
    """As :func:`~serve_app.models.mixtures.experts.pack_experts`, for blocks of this form. Nothing in it is done by
    several ranks together.
    """
    done = 0
    for block in scaled_blocks(model).values():
        experts = block.experts
        weights = [getattr(experts, name) for name in _WEIGHTS]
        if any(w.device.type != "cpu" or not packing_available(w.dtype) for w in weights):
            continue
        if not _is_routed(block) and not _route(block):
            continue
        up, down = (weight.detach().transpose(1, 2) for weight in weights)
        none = [None] * len(up)
        packed = pack_products(ExpertWeights(up, none), ExpertWeights(down, none), store)
        if packed is None:
            continue
        scaled, x = ScaledExperts(experts), _rows(block)
        chosen = torch.arange(len(x))[:, None] % len(up)
        wanted = scaled(x, chosen, x.new_ones(len(x), 1))
        experts.packed_experts = packed
        if not _agree(scaled(x, chosen, x.new_ones(len(x), 1)), wanted):
            log.warning("%s computes something else than packed experts, and stays", type(experts).__name__)
            experts.packed_experts = None
            continue
        for name in _WEIGHTS:
            setattr(experts, name, None)
        done += packed.count
    return done


def _is_scaled(block: Any) -> bool:
    if {name for name, _ in block.named_children()} != _CHILDREN or not isinstance(block.router, nn.Linear):
        return False
    weights = [getattr(block.experts, name, None) for name in _WEIGHTS]
    act = getattr(block.experts, "act_fn", None)
    return hasattr(block, "top_k") and act is not None and _is_silu(act) and all(
        isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights
    )  # fmt: skip


def _is_silu(act: Any) -> bool:
    x = torch.linspace(-8, 8, 32)
    return torch.allclose(act(x), torch.nn.functional.silu(x), atol=1e-5)


def _is_routed(block: Any) -> bool:
    return isinstance(block.forward, RoutedBlock)


def _route(block: Any) -> bool:
    """Routes a block unless it computes something else so."""
    x = _rows(block)
    wanted = block(x)[0]
    route_rows(block)
    if _agree(block(x)[0], wanted):
        return True
    log.warning("%s computes something else with experts by their numbers, and stays", type(block).__name__)
    del block.forward, block.experts.forward
    return False


def _rows(block: Any) -> Tensor:
    weight = block.experts.gate_up_proj
    return torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)


def _agree(found: Tensor, wanted: Tensor) -> bool:
    found, allowed = found.float(), _ALLOWED[wanted.dtype] * wanted.float().square().mean().sqrt()
    return bool((found - wanted.float()).square().mean().sqrt() <= allowed)
