"""The places of a model that adapters are put into, so that each row of a batch runs through its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import AdapterWeights, Delta, read_adapter
from serve_app.kernels.adapted import adapter_linear
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.delta import AdapterLinear, Rows
from serve_app.kernels.linear.packing import Recipe
from serve_app.kernels.linear.places import Places
from serve_app.models.linears import Current, Place, Plug
from serve_app.models.mixtures.mixture import plug_mixtures

# Forms of adapters that are known at a time: a hundred kilobytes each.
FORMS = 32


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
        # Modules that are no linears, and the weights that they have.
        self.owners: dict[str, tuple[str, ...]] = {}
        self._device = device
        self._recipes = Recipes()
        self._holder: Holder = TorchAdapters(places, device)

    def hold(self, linears: list[Place], holder: Holder) -> None:
        """``holder`` computes with the adapters of ``linears``, and nothing else does."""
        self.linears, self._holder, self._recipes = linears, holder, Recipes()

    def reset(self) -> None:
        """Forgets the linears of a forward pass that was tried and left."""
        self.hold([], TorchAdapters(self.places, self._device))
        self.owners = {}

    def plug(self, place: Place, linear: Linear) -> Linear:
        """A :data:`~serve_app.models.linears.Plug`: ``linear`` with this bank's adapters."""
        assert isinstance(self._holder, TorchAdapters)
        self.linears.append(place)
        return self._holder.add(place, linear)

    def plug_mixtures(
        self, model: nn.Module, own: dict[str, dict[str, tuple[int, ...]]], right: set[str], current: Current
    ) -> None:
        """Experts and routers take adapters as well: see :func:`~serve_app.models.mixtures.mixture.plug_mixtures`."""
        assert isinstance(self._holder, TorchAdapters)
        found, self.owners = plug_mixtures(model, own, right, current, self.places)
        for place, deltas in found:
            self.linears.append(place)
            self._holder.take(deltas)

    @property
    def form(self) -> str:
        """Names how adapters are packed for this model; "" where they cannot be written to a file."""
        return self._holder.form if isinstance(self._holder, Places) else ""

    def written(self, prepared: Prepared) -> list[bytes | memoryview]:
        """The parts of a file that :meth:`read_packed` makes the same of; only where there is a :attr:`form`."""
        assert isinstance(self._holder, Places)
        return self._holder.written(prepared.packed)

    def read_packed(self, file: RawIOBase) -> Prepared:
        """Raises :class:`~serve_app.kernels.linear.places.NotPacked`."""
        assert isinstance(self._holder, Places)
        packed = self._holder.read(file)
        return Prepared(packed, packed.bytes)

    @property
    def experts(self) -> int:
        """How many a mixture of the model has; 0 for none."""
        return max((place.experts for place in self.linears), default=0)

    def read(self, config: bytes, weights: bytes | Path) -> Prepared:
        """The adapter of two files as this model takes it. Raises :class:`AdapterRefused`."""
        data = weights.read_bytes() if isinstance(weights, Path) else weights
        if not isinstance(self._holder, Places):
            return self.prepare(read_adapter(config, data, self.owners, self.experts))
        recipe = self._recipes.find(config, data)
        packed = None if recipe is None else self._holder.pack(recipe, data)
        if packed is None:  # the first of its form, or one to refuse by name
            recipe = self._holder.recipe(self.arranged(read_adapter(config, data, self.owners, self.experts)))
            packed = self._holder.pack(recipe)
            self._recipes.keep(config, data, recipe)
        if packed is None:
            raise AdapterRefused("the adapter has numbers that are not finite; train it again")
        return Prepared(packed, packed.bytes)

    def prepare(self, weights: AdapterWeights) -> Prepared:
        """Checks every matrix against the model and packs it; from any thread, beside a step. Raises
        :class:`AdapterRefused`.
        """
        packed = self._holder.prepare(self.arranged(weights))
        return Prepared(packed, packed.bytes)

    def arranged(self, weights: AdapterWeights) -> list[list[Delta | None]]:
        """The deltas of each linear's modules, checked against the model. Raises :class:`AdapterRefused`."""
        known = {
            name: (width, place.columns, (place.experts,) if place.experts else ())
            for place in self.linears
            for name, width in zip(place.names, place.widths, strict=True)
        }
        for name, delta in weights.deltas.items():
            if name not in known:
                raise AdapterRefused(f"{name} is no linear of this model that takes an adapter; leave it out")
            require_sizes(name, delta, *known[name])
        return [[weights.deltas.get(name) for name in place.names] for place in self.linears]

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


def require_sizes(name: str, delta: Delta, n: int, k: int, experts: tuple[int, ...] = ()) -> None:
    """Raises :class:`AdapterRefused` for the delta of another linear than one of ``n`` outputs and ``k`` inputs."""
    if delta.a.shape != (*experts, delta.rank, k) or delta.b.shape != (*experts, n, delta.rank):
        of = f" of {experts[0]} experts each" if experts else ""
        raise AdapterRefused(
            f"the adapter of {name} has A {list(delta.a.shape)} and B {list(delta.b.shape)}, and the model "
            f"takes [r, {k}] and [{n}, r]{of}; was it trained on another model?"
        )


class Recipes:
    """How adapters are packed, by what they have in common: the configuration, and the header of the weights, which
    says where in the file each matrix lies. Whoever reads the next one of a form neither parses nor checks it again.
    """

    def __init__(self) -> None:
        self._recipes: OrderedDict[tuple[bytes, bytes, int], Recipe] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, config: bytes, data: bytes) -> Recipe | None:
        form = _form(config, data)
        with self._lock:
            if (found := self._recipes.get(form)) is not None:
                self._recipes.move_to_end(form)
            return found

    def keep(self, config: bytes, data: bytes, recipe: Recipe) -> None:
        """Of ``data``, which has been checked."""
        if (found := recipe.within(data)) is None:
            return
        with self._lock:
            self._recipes[_form(config, data)] = found
            while len(self._recipes) > FORMS:
                self._recipes.popitem(last=False)


def _form(config: bytes, data: bytes) -> tuple[bytes, bytes, int]:
    """The header begins with its length."""
    return config, data[: 8 + int.from_bytes(data[:8], "little")] if len(data) >= 8 else b"", len(data)


def bank_plug(bank: AdapterBank | None) -> Plug | None:
    """The plug of a bank that no forward pass has used yet, or that has forgotten the one before."""
    if bank is None:
        return None
    bank.reset()
    return bank.plug


class Adapted(Protocol):
    """What computes with the deltas of one place of the model, by the places of adapters."""

    def pack(self, own: list[Delta | None]) -> Any:
        """One adapter's deltas, one per module, with ``bytes``; None where it has none."""
        ...

    def put(self, place: int, delta: Any) -> None:
        """What :meth:`pack` gave into a place."""
        ...


@dataclass(slots=True)
class PackedDeltas:
    """One adapter's delta for each place of the model."""

    deltas: list[Any]

    @property
    def bytes(self) -> int:
        return sum(delta.bytes for delta in self.deltas if delta is not None)


class TorchAdapters:
    """Adapters of linears that torch calls one by one, and of mixtures."""

    def __init__(self, places: int, device: torch.device) -> None:
        self._places, self._device = places, device
        self._adapted: list[Adapted] = []
        self._rows = Rows()

    def add(self, place: Place, linear: Linear) -> AdapterLinear:
        adapted = adapter_linear(linear, self._places, self._rows, place.widths, place.columns, self._device)
        self._adapted.append(adapted)
        return adapted

    def take(self, adapted: Adapted) -> None:
        self._adapted.append(adapted)

    def prepare(self, deltas: list[list[Delta | None]]) -> PackedDeltas:
        return PackedDeltas([each.pack(own) for own, each in zip(deltas, self._adapted, strict=True)])

    def put(self, place: int, packed: PackedDeltas | None) -> None:
        deltas = [None] * len(self._adapted) if packed is None else packed.deltas
        for delta, each in zip(deltas, self._adapted, strict=True):
            each.put(place, delta)
