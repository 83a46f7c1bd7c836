"""The places of a model that adapters are put into, so that each row of a batch runs through its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import AdapterWeights, Delta
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, PlaceDelta, Rows, pack
from serve_app.models.linears import Place, Plug


@dataclass(slots=True)
class Prepared:
    """An adapter as one model takes it; ``bytes`` is the memory that it holds."""

    packed: Any
    bytes: int


class Holder(Protocol):
    """Whatever computes with the adapters of a model's linears."""

    def prepare(self, deltas: list[list[Delta | None]]) -> Any:
        """One adapter's deltas for each linear, one per module of it; the result has ``bytes``."""
        ...

    def put(self, place: int, packed: Any) -> None:
        """Puts what :meth:`prepare` gave (None: nothing) into a place."""
        ...


class AdapterBank:
    """``places`` adapters at most, in places 1 and up, of which a batch names one per row (``Batch.adapters``).

    The forward pass decides what holds them: :meth:`plug` for linears that torch calls, :meth:`hold` for others.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self.places = places
        self.linears: list[Place] = []
        self._device = device
        self._holder: Holder = TorchAdapters(places, device)

    def hold(self, linears: list[Place], holder: Holder) -> None:
        """``holder`` computes with the adapters of ``linears``, and nothing else does."""
        self.linears, self._holder = linears, holder

    def reset(self) -> None:
        """Forgets the linears of a forward pass that was tried and left."""
        self.hold([], TorchAdapters(self.places, self._device))

    def plug(self, place: Place, linear: Linear) -> Linear:
        """A :data:`~serve_app.models.linears.Plug`: ``linear`` with this bank's adapters."""
        assert isinstance(self._holder, TorchAdapters)
        self.linears.append(place)
        return self._holder.add(place, linear)

    def prepare(self, weights: AdapterWeights) -> Prepared:
        """Checks every matrix against the model and packs it; from any thread, beside a step. Raises
        :class:`AdapterRefused`.
        """
        known = {
            name: (width, place.columns)
            for place in self.linears
            for name, width in zip(place.names, place.widths, strict=True)
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
        packed = self._holder.prepare([[weights.deltas.get(name) for name in place.names] for place in self.linears])
        return Prepared(packed, packed.bytes)

    def put(self, place: int, prepared: Prepared) -> None:
        """Makes ``prepared`` the adapter of ``place`` (1 to ``places``): between two steps, or while no running request
        has it.
        """
        self._check(place)
        self._holder.put(place, prepared.packed)

    def clear(self, place: int) -> None:
        """Takes the adapter out of ``place``; its rows would get the base's results."""
        self._check(place)
        self._holder.put(place, None)

    def _check(self, place: int) -> None:
        if not 1 <= place <= self.places:
            raise ValueError(f"place {place}, and the model has places 1 to {self.places}; load it with more")


def bank_plug(bank: AdapterBank | None) -> Plug | None:
    """The plug of a bank that no forward pass has used yet, or that has forgotten the one before."""
    if bank is None:
        return None
    bank.reset()
    return bank.plug


@dataclass(slots=True)
class PackedDeltas:
    """One adapter's delta for each linear."""

    deltas: list[PlaceDelta | None]

    @property
    def bytes(self) -> int:
        return sum(delta.bytes for delta in self.deltas if delta is not None)


class TorchAdapters:
    """Adapters of linears that torch calls one by one."""

    def __init__(self, places: int, device: torch.device) -> None:
        self._places, self._device = places, device
        self._linears: list[tuple[Place, AdapterLinear]] = []
        self._rows = Rows()

    def add(self, place: Place, linear: Linear) -> AdapterLinear:
        adapted = AdapterLinear(linear, self._places, self._rows)
        self._linears.append((place, adapted))
        return adapted

    def prepare(self, deltas: list[list[Delta | None]]) -> PackedDeltas:
        return PackedDeltas(
            [pack(own, place.widths, self._device) for own, (place, _) in zip(deltas, self._linears, strict=True)]
        )

    def put(self, place: int, packed: PackedDeltas | None) -> None:
        deltas = [None] * len(self._linears) if packed is None else packed.deltas
        for delta, (_, linear) in zip(deltas, self._linears, strict=True):
            linear.deltas[place] = delta
