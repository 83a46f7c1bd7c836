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
    from serve_app.kernels.experts import Experts

# Softmax over the experts that are chosen, or over all of them; sigmoids, as they are or as shares of the chosen ones'.
CHOSEN_NORMALISED, CHOSEN_OF_ALL, SIGMOID, SIGMOID_NORMALISED = range(4)
_MIXTURE = struct.Struct(LINEAR + "3P10q3d")
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
class Routing:
    """How a row chooses ``chosen`` experts and weighs them: by ``kind``, times ``scale``, ``rounded`` to the rows'
    dtype or float32. Scores are raised by ``correction`` [experts] float32 to choose, among those of the ``kept`` best
    of so many ``groups``. ``exact``: logits stay float32.
    """

    chosen: int
    kind: int = CHOSEN_NORMALISED
    rounded: bool = False
    exact: bool = False
    scale: float = 1.0
    correction: Tensor | None = None
    groups: int = 1
    kept: int = 1


@dataclass(slots=True)
class MixtureWeight:
    """``router`` [experts, hidden], with one output more where ``gated``; each expert's ``gate_up`` (gates, then ups)
    and ``down``, the ``shared`` ones behind the others, or these alone where the others are ``coded``. Every row goes
    to the shared ones as well, with a weight of 1 or, where ``gated``, of the sigmoid of the router's last output.
    """

    router: LinearWeight
    gate_up: list[LinearWeight]
    down: list[LinearWeight]
    routing: Routing
    gate: Gate
    shared: int = 0
    gated: bool = False
    coded: Experts | None = None  # in four bits

    @property
    def inner(self) -> int:
        """An expert's width."""
        return self.gate_up[0].out_features // 2 if self.coded is None else self.coded.gate.shape[1]

    @property
    def routed(self) -> int:
        """Experts that rows choose from."""
        return len(self.gate_up) - self.shared if self.coded is None else len(self.coded.gate)

    def linears(self) -> Iterator[LinearWeight]:
        """In the order in which they are packed."""
        yield self.router
        yield from self.gate_up
        yield from self.down

    def obstacle(self) -> str | None:
        """Why the C++ pass can't take this mixture, or None."""
        if self.coded is not None:
            return "experts are codes"
        if self.inner % 32 or self.router.parts[0].shape[1] % 32:
            return "an expert's width must be a multiple of 32"
        if not 0 < self.routing.chosen <= self.routed:
            return "rows must choose between one and all of the experts"
        return None


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights float32 and indices int64 [T, chosen] of the experts for ``logits`` [T, experts]."""
    logits = logits.float()
    sigmoids = routing.kind in (SIGMOID, SIGMOID_NORMALISED)
    keys = scores = logits.sigmoid() if sigmoids else logits.softmax(-1)
    if routing.correction is not None:
        keys = keys + routing.correction
    if routing.kept < routing.groups:
        grouped = keys.view(len(keys), routing.groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(routing.kept, -1).indices
        left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=keys.device).scatter_(1, best, False)
        keys = grouped.masked_fill(left_out[..., None], -torch.inf).view_as(keys)
    index = keys.topk(routing.chosen, -1).indices
    weights = scores.gather(1, index)
    if routing.kind in (CHOSEN_NORMALISED, SIGMOID_NORMALISED):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.scale, index


def mixture_record(
    weight: MixtureWeight, pack: Callable[[LinearWeight, bool], tuple[int, ...]], hold: Callable[[bytes], int]
) -> bytes:
    """The record ``Mixture``. ``pack`` gives a linear's record, its panels paired or not; ``hold`` keeps bytes and
    gives their address.
    """
    routing = weight.routing
    router = pack(weight.router, False)
    gate_up = b"".join(_LINEAR.pack(*pack(linear, True)) for linear in weight.gate_up)
    down = b"".join(_LINEAR.pack(*pack(linear, False)) for linear in weight.down)
    correction = routing.correction
    return _MIXTURE.pack(
        *router, hold(gate_up), hold(down),
        0 if correction is None else hold(correction.detach().float().contiguous().numpy().tobytes()),
        len(weight.gate_up) - weight.shared, routing.chosen, weight.shared, weight.inner, routing.groups, routing.kept,
        routing.kind, routing.exact, routing.rounded, weight.gated, routing.scale, weight.gate.alpha, weight.gate.limit,
    )  # fmt: skip
