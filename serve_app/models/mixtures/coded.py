"""Experts that stay in the few bits of their checkpoint, and compute on codes.

While transformers' loader reads them each weight is one parameter of bytes, in whose place it converts, joins and cuts
as it would numbers; then codes and scales are taken apart (:class:`serve_app.kernels.coded.Coded`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from serve_app.kernels.coded import Coded, Form
from serve_app.kernels.experts import Experts
from serve_app.models.mixtures.routed import NotRouted, gate_of

NAME = "serve_app_coded_experts"
_WEIGHTS = ("gate_up_proj", "down_proj")


def coded_experts(model: nn.Module, form: Form) -> dict[str, Any]:
    """The modules of experts that can compute on codes of that form, by name; none unless all of the model's can.
    ``model`` may be without memory.
    """
    found = {}
    for name, module in model.named_modules():
        if not _is_experts(module):
            continue
        experts: Any = module
        weights = [getattr(experts, own, None) for own in _WEIGHTS]
        known = hasattr(experts, "_apply_gate") and not getattr(experts, "has_post_expert_norm", True)
        if not known or not experts.has_gate or any(not _fits(w, columns_of(experts), form) for w in weights):
            return {}
        try:
            gate_of(experts)
        except NotRouted:
            return {}
        found[name] = experts
    return found


def hold_rows(experts: Any, form: Form) -> None:
    """Makes each weight bytes, in which a group of columns is its codes and its scale."""
    experts.form = form
    for name in _WEIGHTS:
        weight = getattr(experts, name)
        shape, dim = list(weight.shape), columns_of(experts)
        shape[dim] = shape[dim] // form.group * form.bytes
        held = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        setattr(experts, name, nn.Parameter(held, requires_grad=False))


def columns_of(experts: Any) -> int:
    """The dimension of the weights' columns."""
    return 1 if experts.is_transposed else 2


def take_codes(model: nn.Module, dtype: torch.dtype) -> int:
    """Makes codes of what :func:`hold_rows` has had read, once it lies where it stays; returns of how many experts."""
    found = [module for module in model.modules() if isinstance(getattr(module, "form", None), Form)]
    return sum(_take_codes(module, dtype) for module in found)


def _take_codes(experts: Any, dtype: torch.dtype) -> int:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def coded(name: str) -> Coded:
        rows = getattr(experts, name).detach()
        rows = rows.transpose(1, 2) if experts.is_transposed else rows
        found = Coded.of_rows(rows, experts.form, dtype)
        setattr(experts, name, None)
        return found

    def biases(name: str) -> Tensor | None:
        return getattr(experts, f"{name}_bias").detach() if experts.has_bias else None

    up, down = map(coded, _WEIGHTS)
    half = up.shape[1] // 2
    halves = (slice(half), slice(half, None)) if experts.is_concatenated else (slice(0, None, 2), slice(1, None, 2))
    joined = biases(_WEIGHTS[0])
    first, second = (None if joined is None else joined[:, which] for which in halves)
    experts.coded = Experts(
        up.outputs(halves[0]), up.outputs(halves[1]), down, first, second, biases(_WEIGHTS[1]), gate_of(experts)
    )
    ALL_EXPERTS_FUNCTIONS.register(NAME, coded_forward)
    experts.config._experts_implementation_internal = NAME
    return len(down)


def coded_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows [T, H] through the experts ``top_k_index`` [T, K], weighted by ``top_k_weights`` [T, K] -> [T, H]."""
    from serve_app.kernels.gpu.backend import operators

    if not hasattr(module, "coded"):  # of a model built for trial with the same configuration
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    mix = operators(hidden_states.device).mix_experts
    return mix(hidden_states, top_k_index, top_k_weights.float(), module.coded)


def takes_codes(device: torch.device) -> bool:
    """Whether experts compute on codes there, and would be unpacked elsewhere."""
    from serve_app.kernels.gpu.backend import operators
    from serve_app.kernels.reference.operators import TORCH

    return operators(device).mix_experts is not TORCH.mix_experts


def _is_experts(module: Any) -> bool:
    return any(isinstance(w := getattr(module, name, None), nn.Parameter) and w.ndim == 3 for name in _WEIGHTS)


def _fits(weight: Any, dim: int, form: Form) -> bool:
    return isinstance(weight, nn.Parameter) and weight.ndim == 3 and weight.shape[dim] % form.group == 0
