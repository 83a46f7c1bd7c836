"""Adapters of a model that several ranks divide: each adds its part of a delta to its part of a linear.

A linear that has some of the outputs takes as many rows of B and all of A; one that has some of the inputs as many
columns of A and all of B, and what ranks then add up is the delta of the whole. The same goes for weights of experts;
of whole experts a rank takes the deltas of those that it holds. Routers are whole on each rank, and so are their
deltas. What is for layers of other stages is theirs; rank 0 checks it for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import AdapterWeights, Delta
from serve_app.kernels.linear.base import Linear
from serve_app.models.adapters import AdapterBank, require_sizes
from serve_app.models.divided.division import Division
from serve_app.models.linears import Current, Place
from serve_app.wire.ranks import RankLinear

# Outputs and inputs of the whole model's linear, and how many experts lie in one weight.
_Sizes = tuple[int, int, tuple[int, ...]]


class PartBank(AdapterBank):
    """One rank's part of a bank; adapters come whole, and are checked against the whole model."""

    def __init__(self, places: int, device: torch.device, division: Division) -> None:
        super().__init__(places, device)
        self._division = division
        # What other ranks have, by name: its sizes. Rank 0 learns it from them; they leave checks to it.
        self._elsewhere: dict[str, _Sizes] | None = None if division.place.rank else {}
        # Of weights of experts and routers the whole model's sizes, and the experts that this rank holds whole.
        self._owned = {
            f"{module}.{key}": _sizes(size) for module, own in division.owned.items() for key, size in own.items()
        }
        self._held: dict[str, list[int]] = {}

    def plug_mixtures(
        self, model: nn.Module, own: dict[str, dict[str, tuple[int, ...]]], right: set[str], current: Current
    ) -> None:
        super().plug_mixtures(model, own, right, current)
        for name in self.owners:
            if (held := getattr(model.get_submodule(name), "held", None)) is not None:
                self._held |= {f"{name}.{key}": held.which for key in own[name]}
        # Files are read whole, with what is for other stages.
        self.owners = {module: tuple(keys) for module, keys in self._division.owned.items()}

    @property
    def experts(self) -> int:
        return max((experts[0] for _, _, experts in self._owned.values() if experts), default=0)

    @property
    def whole_linears(self) -> tuple[RankLinear, ...]:
        """Of this rank, as the whole model has them."""
        return tuple(
            RankLinear(name, n, k, *experts)
            for place in self.linears
            for name, width in zip(place.names, place.widths, strict=True)
            for n, k, experts in (self._whole(name, width, place.columns),)
        )

    def learn(self, others: Iterable[RankLinear]) -> None:
        """At rank 0: what the other ranks have."""
        self._elsewhere = {
            linear.name: (linear.outputs, linear.inputs, (linear.experts,) if linear.experts else ())
            for linear in others
        }

    def plug(self, place: Place, linear: Linear) -> Linear:
        names = tuple(name.removesuffix(".linear") for name in place.names)
        return super().plug(Place(names, place.widths, place.columns, place.experts), linear)

    def arranged(self, weights: AdapterWeights) -> list[list[Delta | None]]:
        sizes = {
            name: (width, place.columns)
            for place in self.linears
            for name, width in zip(place.names, place.widths, strict=True)
        }
        deltas = {}
        for name, delta in weights.deltas.items():
            if name in sizes:
                deltas[name] = self._part(name, delta, *sizes[name])
            elif self._elsewhere is None:
                continue
            elif name in self._elsewhere:
                require_sizes(name, delta, *self._elsewhere[name])
            else:
                deltas[name] = delta  # nobody's, which is refused
        return super().arranged(AdapterWeights(weights.rank, deltas))

    def _whole(self, name: str, n: int, k: int) -> _Sizes:
        """Outputs and inputs of a linear of which this rank has ``n`` and ``k``, or of experts."""
        if name in self._owned:
            return self._owned[name]
        n, k = self._linear(name, n, k)
        return n, k, ()

    def _linear(self, name: str, n: int, k: int) -> tuple[int, int]:
        cut, tensor = self._division.cuts.get(f"{name}.weight"), self._division.place.tensor
        if (heads := self._division.few.get(name)) is not None:
            return n * heads, k
        if cut is None:
            return n, k
        if cut.dim:
            return n, k * tensor
        return self._division.vocab if name == self._division.head else n * tensor, k

    def _part(self, name: str, delta: Delta, n: int, k: int) -> Delta:
        """``n`` outputs and ``k`` inputs are this rank's. Raises :class:`AdapterRefused`."""
        if name in self._owned:
            return self._part_of_owned(name, delta, n, k)
        place, cut = self._division.place, self._division.cuts.get(f"{name}.weight")
        a, b, tensor = delta.a, delta.b, place.tensor
        if (heads := self._division.few.get(name)) is not None:
            _require(name, b, 0, n * heads)
            at = place.part * heads // tensor * n
            return Delta(a, b[at : at + n], delta.scale)
        if cut is None:
            return delta
        if cut.dim:
            _require(name, a, 1, k * tensor)
            return Delta(a[:, place.part * k : (place.part + 1) * k], b, delta.scale)
        if name == self._division.head:
            _require(name, b, 0, self._division.vocab)
            own = place.share(self._division.vocab)
            return Delta(a, b[own.start : own.stop], delta.scale)
        _require(name, b, 0, n * tensor)
        each = n // cut.pieces
        parts = [piece[place.part * each : (place.part + 1) * each] for piece in b.chunk(cut.pieces)]
        return Delta(a, torch.cat(parts), delta.scale)

    def _part_of_owned(self, name: str, delta: Delta, n: int, k: int) -> Delta:
        """Of weights of experts, or of a router, which no rank has in part."""
        whole, place, a, b = self._owned[name], self._division.place, delta.a, delta.b
        require_sizes(name, delta, *whole)
        if (held := self._held.get(name)) is not None:
            return Delta(a[held], b[held], delta.scale)
        if n != whole[0]:
            pieces = self._division.cuts[name].pieces
            parts = [piece.chunk(place.tensor, 1)[place.part] for piece in b.chunk(pieces, 1)]
            return Delta(a, torch.cat(parts, 1), delta.scale)
        if k != whole[1]:
            return Delta(a[..., place.part * k : (place.part + 1) * k], b, delta.scale)
        return delta


def _sizes(weight: tuple[int, ...]) -> _Sizes:
    """Of [E, n, k] or [n, k]; of a bias what no delta has."""
    *experts, n, k = weight if len(weight) > 1 else (0, *weight)
    return n, k, tuple(experts)


def _require(name: str, matrix: Tensor, dim: int, size: int) -> None:
    if matrix.shape[dim] != size:
        raise AdapterRefused(
            f"the adapter of {name} has a matrix {list(matrix.shape)} where the model has {size}; was it trained on "
            "another model?"
        )


def part_bank(places: int, device: torch.device, division: Division | None) -> Any:
    """A bank of a model or of a rank's part of it; None without places."""
    if not places:
        return None
    return AdapterBank(places, device) if division is None else PartBank(places, device, division)
