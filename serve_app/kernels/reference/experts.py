"""Routed experts in plain torch: the truth for ``kernels/gpu/experts.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.experts import Experts


def mix_experts(x: Tensor, index: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Rows [T, H] through the experts ``index`` [T, C] int64, no expert twice in a row, weighted by ``weights`` [T, C]
    float32; returns [T, H].
    """
    choices = index.shape[1]
    chosen = index.reshape(-1)
    out = x.new_empty(len(chosen), x.shape[1])
    for expert in chosen.unique().tolist():
        pairs = (chosen == expert).nonzero()[:, 0]
        rows = x[pairs // choices]
        gates = F.linear(rows, experts.gate[expert], _of(experts.gate_bias, expert))
        ups = F.linear(rows, experts.up[expert], _of(experts.up_bias, expert))
        inner = experts.activation(gates.float(), ups.float()).to(x.dtype)
        out[pairs] = F.linear(inner, experts.down[expert], _of(experts.down_bias, expert))
    total = torch.zeros(x.shape, device=x.device)
    for choice in range(choices):  # in this order always: a sum of floats depends on it
        total += out.view(len(x), choices, -1)[:, choice].float() * weights[:, choice, None]
    return total.to(x.dtype)


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
