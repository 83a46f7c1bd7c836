"""The experts of a decoder's layer as the C++ pass takes them (``cpu/mixture.h``), and the same in torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.linear.panels import LINEAR

if TYPE_CHECKING:
    from serve_app.kernels.decoder import LinearWeight

# Softmax over the experts that are chosen, or over all of them.
CHOSEN_NORMALISED, CHOSEN_OF_ALL = 0, 1
_MIXTURE = struct.Struct(LINEAR + "2P5q2d")
_LINEAR = struct.Struct(LINEAR)
# The record of a linear that a layer does without.
ABSENT = (0, 0, 0, 0, 0, 0, 0, 16)


@dataclass(slots=True, frozen=True)
class Gate:
    """``silu(gate) * up``; with ``limit`` gpt-oss's: gate at most ``limit``, up within it, ``(up + 1) * gate *
    sigmoid(alpha * gate)``.
    """

    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.limit:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(slots=True)
class MixtureWeight:
    """``router`` [experts, hidden]; each expert's ``gate_up`` (gates, then ups) and ``down``. A row goes to ``chosen``
    experts with weights by ``routing``, which are ``rounded`` to the rows' dtype or stay float32.
    """

    router: LinearWeight
    gate_up: list[LinearWeight]
    down: list[LinearWeight]
    chosen: int
    routing: int
    rounded: bool
    gate: Gate

    @property
    def inner(self) -> int:
        """An expert's width."""
        return self.gate_up[0].out_features // 2

    def linears(self) -> Iterator[LinearWeight]:
        """In the order in which they are packed."""
        yield self.router
        yield from self.gate_up
        yield from self.down

    def obstacle(self) -> str | None:
        """Why the C++ pass can't take this mixture, or None."""
        if self.inner % 32 or self.router.parts[0].shape[1] % 32:
            return "an expert's width must be a multiple of 32"
        if not 0 < self.chosen <= len(self.gate_up):
            return "rows must choose between one and all of the experts"
        return None


def choose(logits: Tensor, chosen: int, routing: int) -> tuple[Tensor, Tensor]:
    """Weights float32 and indices int64 [T, chosen] of the experts for ``logits`` [T, experts]."""
    if routing == CHOSEN_OF_ALL:
        weights, index = logits.float().softmax(-1).topk(chosen, -1)
        return weights, index
    values, index = logits.float().topk(chosen, -1)
    return values.softmax(-1), index


def mixture_record(
    weight: MixtureWeight, pack: Callable[[LinearWeight, bool], tuple[int, ...]], hold: Callable[[bytes], int]
) -> bytes:
    """The record ``Mixture``. ``pack`` gives a linear's record, its panels paired or not; ``hold`` keeps bytes and
    gives their address.
    """
    router = pack(weight.router, False)
    gate_up = b"".join(_LINEAR.pack(*pack(linear, True)) for linear in weight.gate_up)
    down = b"".join(_LINEAR.pack(*pack(linear, False)) for linear in weight.down)
    return _MIXTURE.pack(
        *router, hold(gate_up), hold(down), len(weight.gate_up), weight.chosen, weight.inner, weight.routing,
        weight.rounded, weight.gate.alpha, weight.gate.limit,
    )  # fmt: skip
