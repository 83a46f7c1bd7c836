"""Rows of a step shared out among the ranks of a stage, and experts that rows travel to.

Where it pays (:mod:`serve_app.parallel.dispatch`), a rank has some rows of a large step between layers, and not all::

    own rows -> norm -> all rows -> attention, its heads -> sums of own rows -> norm, router, own rows
                                                                                      | each to its experts' ranks
    own rows <- sum of what comes back <- experts, rows of all ranks <----------------+

Dense layers between mixtures take all rows and hand back sums of own rows, as attention does. Steps of few rows, such
as those that generate, are computed with all rows on every rank. Sizes of what travels differ from step to step, so
that CUDA graphs can hold steps of few rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.models.divided.placing import Counts
from serve_app.parallel.group import Group
from serve_app.parallel.place import Place

# Rows [m, H], the slot of each choice [m, k] and its weight [m, k] -> [m, H] in float32: what this rank's experts give.
Local = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shares:
    """Which rows of the step under way are whose. Steps of ``least`` rows or more are shared out; 0: none are.
    ``chosen``: what rows choose.
    """

    def __init__(self, group: Group, least: int, counts: Counts) -> None:
        self.group, self.least, self.chosen = group, least, counts
        # Of the step under way, and of these each part's; none: every rank has all rows.
        self.rows = 0
        self.counts: list[int] = []

    def begin(self, x: Tensor) -> Tensor:
        """All rows [1, T, ...] as the first layer gets them -> those that this rank goes on with."""
        self.chosen.look()
        rows, tensor = x.shape[1], self.group.place.tensor
        self.rows = rows if 0 < self.least <= rows else 0
        self.counts = [len(Place(tensor, 1, part).share(self.rows)) for part in range(tensor)]
        return self.own(x)

    def own(self, x: Tensor) -> Tensor:
        """This rank's of all rows."""
        if not self.rows:
            return x
        own = self.group.place.share(self.rows)
        return x.narrow(_axis(x), own.start, len(own))

    def join(self, x: Tensor) -> Tensor:
        """All rows, of which each rank gives its own."""
        if not self.rows:
            return x
        tensor, axis = self.group.place.tensor, _axis(x)
        flat = x.reshape(x.shape[axis], math.prod(x.shape[axis + 1 :]))
        found = self.group.exchange(flat.repeat(tensor, 1), [len(flat)] * tensor, self.counts)
        return found.view(*x.shape[:axis], self.rows, *x.shape[axis + 1 :])

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the parts' ``x`` [..., T, H]: this rank's rows of it."""
        if not self.rows:
            return self.group.sum(x)
        tensor, own = self.group.place.tensor, self.counts[self.group.place.part]
        found = self.group.exchange(x.reshape(-1, x.shape[-1]), self.counts, [own] * tensor)
        return found.view(tensor, *x.shape[:-2], own, x.shape[-1]).float().sum(0).to(x.dtype)

    def through_experts(self, x: Tensor, slots: Tensor, weights: Tensor, count: int, local: Local) -> Tensor:
        """Own rows [n, H] through experts anywhere, ``count`` on each rank: a row goes once to each rank that has any
        of its ``slots`` [n, k], which adds up what they give.
        """
        tensor, group = self.group.place.tensor, self.group
        goes = torch.zeros(len(x), tensor, dtype=torch.bool, device=x.device).scatter_(1, slots // count, True)
        rows = goes.T.nonzero()[:, 1]  # rank by rank
        give = goes.sum(0)
        take = group.exchange(give, [1] * tensor, [1] * tensor)
        given, taken = give.tolist(), take.tolist()
        routed = (x[rows], slots[rows].int(), weights[rows])
        message = torch.cat([each.contiguous().view(torch.uint8) for each in routed], 1)
        here = group.exchange(message, given, taken)
        widths = [each.shape[1] * each.element_size() for each in routed]
        came, wanted, weighed = (
            part.contiguous().view(each.dtype) for part, each in zip(here.split(widths, 1), routed, strict=True)
        )
        back = group.exchange(local(came, wanted.long(), weighed).to(x.dtype), taken, given)
        return torch.zeros(x.shape, device=x.device).index_add_(0, rows, back.float()).to(x.dtype)


def _axis(x: Tensor) -> int:
    """Where rows are: [T, H], or [1, T, ...], of which some models have several streams for each row."""
    return 0 if x.ndim == 2 else 1


def share_rows(layers: list[nn.Module], shares: Shares, dense: set[nn.Module], experts: set[nn.Module]) -> None:
    """Has all rows come together before attention, and before ``dense`` modules whose results are summed."""

    def visit(module: nn.Module) -> None:
        for child in module.children():
            attends = hasattr(child, "layer_idx") and not experts.intersection(child.modules())
            if attends or child in dense:
                child.register_forward_pre_hook(_joins(shares), with_kwargs=True)
            if attends:
                child.register_forward_hook(_owns(shares))
            else:
                visit(child)

    for layer in layers:
        visit(layer)


def with_states(change: Callable[[Tensor], Tensor], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a module is called with, its hidden states changed."""
    if inputs:
        return (change(inputs[0]), *inputs[1:]), options
    return inputs, {**options, "hidden_states": change(options["hidden_states"])}


def _joins(shares: Shares) -> Any:
    return lambda module, inputs, options: with_states(shares.join, inputs, options)


def _owns(shares: Shares) -> Any:
    """Of attention whose results are whole on each rank."""

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        states = out[0] if isinstance(out, tuple) else out
        if not shares.rows or states.shape[-2] == shares.counts[shares.group.place.part]:
            return out
        return (shares.own(states), *out[1:]) if isinstance(out, tuple) else shares.own(states)

    return hook
