"""Bytes of weights that a loaded model holds, counted where they lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from serve_app.models.latent import latent_of


def held_bytes(module: nn.Module, forward: Any) -> int:
    """Of the module's parameters and buffers, each memory once, of linears that were packed into others, and of what
    ``forward`` holds itself.
    """
    seen: dict[int, int] = {}

    def count(tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.numel():
            if tensor.is_mkldnn:
                seen[id(tensor)] = tensor.numel() * tensor.itemsize
            else:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    for tensor in (*module.parameters(), *module.buffers()):
        count(tensor)
    stores: dict[int, int] = {}
    for child in module.modules():
        if (latent := latent_of(child)) is not None:
            count(latent.keys)
            count(latent.values)
        if (coded := getattr(child, "coded", None)) is not None:
            for weight in (coded.gate, coded.up, coded.down):
                count(weight.codes)
                count(weight.scales)
        for part in _packed(child):
            count(getattr(part, "packed", None))
            if (store := getattr(part, "store", None)) is not None:
                stores[id(store)] = store.bytes
    for weight in getattr(forward, "weights", list)():
        count(weight)
    return sum(seen.values()) + sum(stores.values()) + getattr(forward, "packed_bytes", 0)


def _packed(child: Any) -> list[Any]:
    found = [child.weights] if hasattr(child, "weights") and not isinstance(child.weights, Tensor) else []
    experts = getattr(child, "packed_experts", None)
    if experts is not None:
        for product in (experts.up, experts.down):
            found += [product, *(linear.weights for linear in getattr(product, "linears", ()))]
    return found
