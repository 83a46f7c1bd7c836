"""The places of a model that adapters are put into, so that each row of a batch runs through its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import AdapterWeights, Delta
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, PlaceDelta, Rows, pack
from serve_app.models.linears import Place


@dataclass(slots=True)
class Prepared:
    """An adapter as one model takes it; ``bytes`` is the memory that it holds."""

    sites: list[Any]
    bytes: int


class Site(Protocol):
    """One linear of the model: ``names`` of its modules, whose outputs of ``widths`` stand side by side."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    columns: int

    def prepare(self, deltas: list[Delta | None]) -> Any:
        """What :meth:`put` takes, with ``bytes``; None where no delta is there."""
        ...

    def put(self, place: int, delta: Any) -> None:
        """Puts a prepared delta (None: none) into a place."""
        ...


class AdapterBank:
    """``places`` adapters at most, in places 1 and up, of which a batch names one per row (``Batch.adapters``)."""

    def __init__(self, places: int, device: torch.device) -> None:
        self.places, self.device = places, device
        self.sites: list[Site] = []
        self._rows = Rows()

    def plug(self, place: Place, linear: Linear) -> Linear:
        """A :data:`~serve_app.models.linears.Plug`: ``linear`` with this bank's adapters."""
        adapted = AdapterLinear(linear, self.places, self._rows)
        self.sites.append(LinearSite(place.names, place.widths, place.columns, adapted, self.device))
        return adapted

    def prepare(self, weights: AdapterWeights) -> Prepared:
        """Checks every matrix against the model and packs it; from any thread, beside a step. Raises
        :class:`AdapterRefused`.
        """
        known = {
            name: (width, site.columns)
            for site in self.sites
            for name, width in zip(site.names, site.widths, strict=True)
        }
        for name, delta in weights.deltas.items():
            if name not in known:
                raise AdapterRefused(f"{name} is no linear of this model that takes an adapter; leave it out")
            n, k = known[name]
            if delta.a.shape != (delta.rank, k) or delta.b.shape != (n, delta.rank):
                raise AdapterRefused(
                    f"the adapter of {name} has A {list(delta.a.shape)} and B {list(delta.b.shape)}, and the model "
                    f"takes [r, {k}] and [{n}, r]; was it trained on another model?"
                )
        packed = [site.prepare([weights.deltas.get(name) for name in site.names]) for site in self.sites]
        return Prepared(packed, sum(delta.bytes for delta in packed if delta is not None))

    def put(self, place: int, prepared: Prepared) -> None:
        """Makes ``prepared`` the adapter of ``place`` (1 to ``places``): between two steps, or while no running request
        has it.
        """
        self._check(place)
        for site, delta in zip(self.sites, prepared.sites, strict=True):
            site.put(place, delta)

    def clear(self, place: int) -> None:
        """Takes the adapter out of ``place``; its rows would get the base's results."""
        self._check(place)
        for site in self.sites:
            site.put(place, None)

    def _check(self, place: int) -> None:
        if not 1 <= place <= self.places:
            raise ValueError(f"place {place}, and the model has places 1 to {self.places}; load it with more")


@dataclass(slots=True)
class LinearSite:
    """A linear that torch adds deltas to."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    columns: int
    linear: AdapterLinear
    device: torch.device

    def prepare(self, deltas: list[Delta | None]) -> PlaceDelta | None:
        return pack(deltas, self.widths, self.device)

    def put(self, place: int, delta: PlaceDelta | None) -> None:
        self.linear.deltas[place] = delta
