"""A mixture in the pass for GPUs: its routing in torch's operators, its experts by one operator, shared ones beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.decoder import LinearWeight
from serve_app.kernels.experts import stack
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.mixture import MixtureWeight, choose
from serve_app.kernels.operators import Operators


class DeviceMixture:
    """Rows [T, H] to [T, H]; nothing in it waits for the host. Raises ValueError for weights that are not covered."""

    def __init__(self, weight: MixtureWeight, operators: Operators, make: Callable[[LinearWeight], Linear]) -> None:
        self.operators, self.routing = operators, weight.routing
        self.experts = stack(weight) if weight.coded is None else weight.coded
        # Exact logits are products of float32; converted once.
        dtype = torch.float32 if self.routing.exact else self.experts.down.dtype
        self.router = weight.router.parts[0].to(dtype)
        self.router_bias = weight.router.biases[0].to(dtype) if weight.router.biases else None
        self.shared_gate = weight.router.parts[1] if weight.gated else None
        self.gate_up: Linear | None = None
        self.down: Linear | None = None
        if weight.shared:
            first, second = weight.gate_up[-weight.shared :], weight.down[-weight.shared :]
            halves = [torch.cat([each.parts[half] for each in first]) for half in (0, 1)]
            self.gate_up = make(LinearWeight([torch.cat(halves)]))
            self.down = make(LinearWeight([torch.cat([each.parts[0] for each in second], 1)]))

    def __call__(self, x: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        logits = F.linear(x.to(self.router.dtype), self.router, self.router_bias)
        weights, index = choose(logits, self.routing)
        if self.routing.rounded:
            weights = weights.to(x.dtype).float()
        out = self.operators.mix_experts(x, index, weights, self.experts)
        if self.gate_up is None or self.down is None:
            return out
        shared = self.down(self.operators.swiglu(self.gate_up(x, batch, rows)), batch, rows)
        if self.shared_gate is not None:
            shared = shared * F.linear(x, self.shared_gate).sigmoid()
        return out + shared

    @property
    def read_by_one_row(self) -> int:
        """Bytes of weights that a row makes a step read."""
        chosen = self.routing.chosen * self.experts.bytes_of_one
        shared: list[Any] = [linear for linear in (self.gate_up, self.down) if linear is not None]
        return chosen + self.router.nbytes + sum(linear.weight.nbytes for linear in shared)
