"""What stands in a divided model where its ranks have to come together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.kernels.linear.base import Linear
from serve_app.models.divided.placing import Slots
from serve_app.models.divided.sharing import Shares
from serve_app.models.linears import Place as LinearPlace
from serve_app.models.linears import Plug
from serve_app.parallel.group import Group


class Joining(nn.Module):
    """Stands where ``linear``, of which this rank has a part, stood."""

    def __init__(self, linear: nn.Linear, shares: Shares) -> None:
        super().__init__()
        self.linear, self.shares, self.group = linear, shares, shares.group

    @property
    def weight(self) -> Tensor:
        """For modelling code that asks for a dtype or a device."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias


class SummedLinear(Joining):
    """A linear that has some columns of its inputs: the results of all parts are added. One of them has the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return self.shares.sum(self.linear(x))


class SlicedLinear(Joining):
    """As :class:`SummedLinear`, where the inputs are whole on each rank and it takes its own columns of them."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.group.place.share(x.shape[-1])
        return self.group.sum(self.linear(x[..., own.start : own.stop]))


class JoinedLinear(Joining):
    """A linear that has some of the outputs, where what follows takes all of them apart in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.group.join_columns(self.linear(x))


@dataclass(slots=True)
class Held:
    """What a rank with whole experts has: ``which``, slot by slot. ``through`` takes ``rows`` of the step, one for each
    pair with an expert from here, and adapters may put something of theirs into its place.
    """

    which: list[int]
    through: Callable[..., Tensor]
    rows: Tensor | None = None


def hold_experts(
    experts: Any, shares: Shares, *, summed: bool, slots: Slots | None = None, counted: Tensor | None = None
) -> None:
    """Makes of transformers' experts, of which this rank has its share, all of them: rows that have chosen one from
    here go through it, each pair of a row and an expert by itself. Where every rank of a stage has all rows, none has
    to travel, and the ranks add up what comes out, here if ``summed``; else rows go to their experts. ``slots``: where
    these lie, if not in order; ``counted`` gets how often each is chosen.
    """
    count, group = len(next(experts.parameters(recurse=False))), shares.group
    first, experts.num_experts = group.place.part * count, count
    held = Held(list(range(first, first + count)) if slots is None else slots.own, experts.forward)
    experts.held = held

    def local(x: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        own = wanted - first
        rows, choices = torch.nonzero((own >= 0) & (own < count), as_tuple=True)
        out = torch.zeros(x.shape, device=x.device)
        if len(rows):
            pairs = own[rows, choices, None], weights[rows, choices, None]
            held.rows = rows
            out.index_add_(0, rows, held.through(x[rows], *pairs).float())
        return out

    def forward(hidden_states: Tensor, *routed: Tensor, **named: Tensor) -> Tensor:
        index, weights = (*routed, *named.values())
        if index.shape != weights.shape or hidden_states.ndim != 2:
            raise ValueError(f"{type(experts).__name__} is not told of experts row by row")
        if counted is not None:
            flat = index.reshape(-1)
            counted.scatter_add_(0, flat, torch.ones_like(flat))
        index = index if slots is None else slots.choose(index)
        if shares.rows:
            return shares.through_experts(hidden_states, index, weights, count, local)
        out = local(hidden_states, index, weights)
        return (group.sum(out) if summed else out).to(hidden_states.dtype)

    experts.forward = forward


class VocabularyEmbedding(nn.Module):
    """Stands where an embedding stood of which this rank has the rows from ``first`` on."""

    def __init__(self, table: Any, first: int, group: Group) -> None:
        super().__init__()
        self.table, self.first, self.group = table, first, group

    @property
    def weight(self) -> Tensor:
        """For modelling code that asks for a dtype or a device."""
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.first
        there = (own >= 0) & (own < len(self.table.weight))
        found = self.table(own.where(there, 0))
        return self.group.sum(found.masked_fill(~there.unsqueeze(-1), 0))


class PartOfGroups(nn.Module):
    """This rank's groups of a linear whose inputs lie in groups, each with weights of its own (DeepSeek V4)."""

    def __init__(self, linear: Any, shares: Shares) -> None:
        super().__init__()
        self.linear, self.groups = linear, linear.n_groups // shares.group.place.tensor
        linear.n_groups = self.groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., groups of the model, inputs], of the heads that are here, in which its own groups lie one behind
        another."""
        return self.linear(x.flatten(-2).unflatten(-1, (self.groups, -1)))


class NoEmbedding(nn.Module):
    """Of a stage that gets hidden states: something of their shape for modelling code, which nobody reads."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.weight: Tensor
        self.register_buffer("weight", torch.zeros(1, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self.width, dtype=self.weight.dtype, device=ids.device)


class Through(nn.Module):
    """Of what another stage has: hands on what comes in; in a ``pair`` with nothing, as some families' layers do."""

    # Qwen2-Audio's forward asks what hears where it is, and needs it for sounds alone.
    device = torch.device("cpu")

    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, *inputs: Any, **options: Any) -> Any:
        states = inputs[0] if inputs else options["hidden_states"]
        return (states, None) if self.pair else states


class PartLinear(Linear):
    """:class:`SummedLinear` where the fused decoder calls its linears."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self._linear, self._group, self.dtype = linear, group, linear.dtype

    def __call__(self, x: Tensor, batch: Any, rows: Tensor | None = None) -> Tensor:
        return self._group.sum(self._linear(x, batch, rows))


def sums(group: Group, names: set[str]) -> Plug:
    """A plug that adds up the parts of the linears of these ``names``."""

    def plug(place: LinearPlace, linear: Linear) -> Linear:
        return PartLinear(linear, group) if names & set(place.names) else linear

    return plug
