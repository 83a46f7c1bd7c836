"""Adapters of what a mixture has beside linears: the weights of its experts, all in one parameter, and its router.

PEFT adds ``scale * B @ A`` to such a weight, and computes with the sum. A router's sum is made when the adapter is
packed, and its rows are routed with it. Experts' weights are large and shared: here the delta is added to the result of
each pair of a row and an expert, in float32. In float32 that is the same sum; in 16 bits PEFT rounds the sum of the
weights, and this does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.adapters.mixture import DOWN, JOINED, UP, WEIGHT
from serve_app.kernels.linear.delta import Rows
from serve_app.models.linears import Current, Place
from serve_app.models.mixtures.experts import PackedExperts, through

if TYPE_CHECKING:
    from serve_app.adapters.weights import Delta


def own_weights(model: nn.Module) -> dict[str, dict[str, tuple[int, ...]]]:
    """Sizes of the weights that adapters may be for, by module: [E, n, k] of experts, [n, k] of routers beside them."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, block in model.named_modules():
        experts: Any = getattr(block, "experts", None)
        if not name or not _experts(experts):
            continue
        for child_name, child in block.named_children():
            weight = getattr(child, WEIGHT, None)
            if child is experts:
                found[f"{name}.{child_name}"] = _expert_sizes(experts)
            elif _is_router(child) and isinstance(weight, nn.Parameter):
                own = {key: tuple(p.shape) for key, p in child.named_parameters(recurse=False)}
                found[f"{name}.{child_name}"] = own
    return found


def _experts(module: Any) -> bool:
    """Whether the module is built by transformers' ``use_experts_implementation``, with nothing behind its experts."""
    if getattr(module, "has_post_expert_norm", True) or not hasattr(module, "_apply_gate"):
        return False
    weights = (getattr(module, JOINED if module.has_gate else UP, None), getattr(module, DOWN, None))
    return all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights)


def _expert_sizes(module: Any) -> dict[str, tuple[int, ...]]:
    sizes = {}
    for name, weight in module.named_parameters(recurse=False):
        shape = tuple(weight.shape)
        sizes[name] = (shape[0], shape[2], shape[1]) if module.is_transposed and len(shape) == 3 else shape
    return sizes


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, WEIGHT, None)
    plain = isinstance(module, nn.Linear | nn.Embedding) or next(module.children(), None) is not None
    return not plain and isinstance(weight, nn.Parameter) and weight.ndim == 2


@dataclass(slots=True)
class ExpertDelta:
    """``a`` [E, r, k] and ``b`` [E, n, r], scaled, float32."""

    a: Tensor
    b: Tensor

    @property
    def bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def add(self, out: Tensor, x: Tensor, chosen: Tensor, pairs: Tensor) -> None:
        """To ``out`` [P, n], for those ``pairs`` whose rows have this adapter, of ``x`` [T, k] or [P, k]."""
        choices, experts = len(out) // len(x), chosen[pairs]
        for expert in experts.unique().tolist():
            own = pairs[experts == expert]
            added = F.linear(F.linear(x[own // choices].float(), self.a[expert]), self.b[expert])
            out[own] = (out[own].float() + added).to(out.dtype)


@dataclass(slots=True)
class RouterWeight:
    """The router's weight with an adapter's delta in it."""

    weight: nn.Parameter

    @property
    def bytes(self) -> int:
        return self.weight.nbytes


class WeightDeltas:
    """The adapters of one weight, by place."""

    def __init__(self, places: int, pack: Callable[[Delta], Any]) -> None:
        self.deltas: list[Any] = [None] * (places + 1)
        self._pack = pack

    def pack(self, own: list[Delta | None]) -> Any:
        return None if own[0] is None else self._pack(own[0])

    def put(self, place: int, delta: Any) -> None:
        self.deltas[place] = delta


class AdapterExperts:
    """Stands in the place of the forward function of a mixture's experts."""

    def __init__(self, module: Any, current: Current, places: int, rows: Rows) -> None:
        self._module, self._current, self._rows = module, current, rows
        # Of a rank that holds some experts whole, those rows that have chosen one of them.
        self._held = getattr(module, "held", None)
        self._plain = module.forward if self._held is None else self._held.through
        device = module.down_proj.device if module.down_proj is not None else torch.device("cpu")

        def packed(delta: Delta) -> ExpertDelta:
            b = delta.b.to(device, torch.float32) * delta.scale
            return ExpertDelta(delta.a.to(device, torch.float32).contiguous(), b.contiguous())

        self.up, self.down = WeightDeltas(places, packed), WeightDeltas(places, packed)

    def __call__(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        batch = self._current.batch
        if batch is None or batch.adapters is None:
            return self._plain(x, top_k_index, top_k_weights)
        groups = [
            (place, own)
            for place, own in self._rows.groups(batch.adapters, None if self._held is None else self._held.rows)
            if self.up.deltas[place] is not None or self.down.deltas[place] is not None
        ]
        packed: PackedExperts | None = getattr(self._module, "packed_experts", None)
        if packed is not None:
            return self._through(packed, x, top_k_index, top_k_weights, groups)
        # Rows without an adapter get what they would have got.
        out = self._plain(x, top_k_index, top_k_weights)
        if groups:
            own = torch.cat([rows for _, rows in groups])
            at, parts = 0, []
            for place, rows in groups:
                parts.append((place, torch.arange(at, at + len(rows), device=x.device)))
                at += len(rows)
            plain = PackedExperts(self._product(JOINED), self._product(DOWN), len(self._module.down_proj))
            out[own] = self._through(plain, x[own], top_k_index[own], top_k_weights[own], parts)
        return out

    def _through(
        self, products: PackedExperts, x: Tensor, index: Tensor, weights: Tensor, groups: list[tuple[int, Tensor]]
    ) -> Tensor:
        steps = torch.arange(index.shape[1], device=x.device)
        pairs = [(place, (own[:, None] * len(steps) + steps).reshape(-1)) for place, own in groups]

        def with_deltas(product: Any, deltas: list[ExpertDelta | None]) -> Callable[[Tensor, Tensor], Tensor]:
            def called(rows: Tensor, chosen: Tensor) -> Tensor:
                out: Tensor = product(rows, chosen)
                for place, own in pairs:
                    if (delta := deltas[place]) is not None:
                        delta.add(out, rows, chosen, own)
                return out

            return called

        up, down = with_deltas(products.up, self.up.deltas), with_deltas(products.down, self.down.deltas)
        return through(self._module, PackedExperts(up, down, products.count), x, index, weights)

    def _product(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """By the module's own weights."""
        module = self._module
        name = UP if name == JOINED and not module.has_gate else name
        weights, biases = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None

        def product(x: Tensor, chosen: Tensor) -> Tensor:
            choices = len(chosen) // max(1, len(x))
            out = x.new_empty(len(chosen), weights.shape[2 if module.is_transposed else 1])
            for expert in chosen.unique().tolist():
                own = (chosen == expert).nonzero()[:, 0]
                weight = weights[expert].t() if module.is_transposed else weights[expert]
                out[own] = F.linear(x[own // choices], weight, None if biases is None else biases[expert])
            return out

        return product


class AdapterRouter:
    """Stands in the place of a router's forward function."""

    def __init__(self, module: Any, current: Current, places: int, rows: Rows) -> None:
        self._module, self._current, self._rows, self._plain = module, current, rows, module.forward
        own = module.weight

        def packed(delta: Delta) -> RouterWeight:
            added = (delta.b.float() @ delta.a.float() * delta.scale).to(own.device, own.dtype)
            return RouterWeight(nn.Parameter(own.detach() + added, requires_grad=False))

        self.weights = WeightDeltas(places, packed)

    def __call__(self, x: Tensor, *more: Any) -> Any:
        batch, found = self._current.batch, self._plain(x, *more)
        if batch is None or batch.adapters is None:
            return found
        single = isinstance(found, Tensor)
        outs = (found,) if single else found
        flat, base = x.reshape(-1, x.shape[-1]), self._module.weight
        for place, own in self._rows.groups(batch.adapters, None):
            if (routed := self.weights.deltas[place]) is None:
                continue
            self._module.weight = routed.weight
            try:
                part = self._plain(flat[own], *more)
            finally:
                self._module.weight = base
            for out, new in zip(outs, (part,) if single else part, strict=True):
                out.view(len(flat), -1)[own] = new.view(len(own), -1)
        return found


def plug_mixtures(
    model: nn.Module, sizes: dict[str, dict[str, tuple[int, ...]]], right: set[str], current: Current, places: int
) -> tuple[list[tuple[Place, WeightDeltas]], dict[str, tuple[str, ...]]]:
    """Puts adapters into the modules of ``sizes`` (:func:`own_weights`) whose rows are tokens (``right``). Returns the
    places of their weights, and what weights each module has.
    """
    rows, found, owners = Rows(), [], {}
    for name, own in sizes.items():
        if name not in right:
            continue
        module: Any = model.get_submodule(name)
        if WEIGHT in own:
            router = AdapterRouter(module, current, places, rows)
            module.forward = router
            n, k = own[WEIGHT]
            found.append((Place((f"{name}.{WEIGHT}",), (n,), k), router.weights))
        else:
            experts = AdapterExperts(module, current, places, rows)
            if (held := getattr(module, "held", None)) is None:
                module.forward = experts
            else:
                held.through = experts
            for weight, deltas in ((JOINED if module.has_gate else UP, experts.up), (DOWN, experts.down)):
                count, n, k = own[weight]
                found.append((Place((f"{name}.{weight}",), (n,), k, count), deltas))
        owners[name] = tuple(own)
    return found, owners
