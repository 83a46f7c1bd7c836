"""What a worker on a CPU holds of a checkpoint: linears are packed anew when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from serve_app.planning.tensors import Tensor

# Outputs of a panel, and bytes of panels from which on they are packed into 12 bits (serve_app/kernels/linear).
PANEL = 64
COMPACT_ABOVE_BYTES = 64 << 20
# Beside 12 bits a value: where each block of 16 columns begins in the list of exceptions, and one in 3,000 of them.
COMPACT_BYTES = 1.5 + 4 / (16 * PANEL) + 4 / 3000
GROUP = 64
_QUANTIZED = {"int8": 1 + 2 / GROUP, "int4": 0.5 + 4 / GROUP}
_LINEARS = ("experts", "shared experts", "latent projections", "indexers", "head", "attention", "mlp", "routers")
_EXPANDS = ".kv_b_proj.weight"
_ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True, frozen=True)
class Held:
    """How a worker on a CPU has its weights. ``panels``: whether the CPU multiplies bfloat16 in panels, and with it
    codes of fewer bits.
    """

    dtype: str = "bfloat16"
    quantization: str = "none"
    panels: bool = True


def panels_here() -> bool:
    """Whether this machine's CPU does."""
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported())


def as_held(tensors: Iterable[Tensor], held: Held, *, routers: bool = True, latents: bool = False) -> list[Tensor]:
    """``tensors`` with the bytes that they take once loaded. A head that is tied to the embedding is packed beside
    it. ``routers``: whether these are packed as well, as in our own pass over layers. ``latents``: whether the cache
    holds some, what expands which is not packed then.
    """
    dtype, panels = held.dtype, held.panels
    quantization = held.quantization if panels and dtype == "bfloat16" else "none"
    found = list(tensors)
    # Experts are rounded altogether or not at all.
    whole = all(size % GROUP == 0 for t in found if t.role == "experts" and is_linear(t) for size in t.shape[-2:])
    if not any(tensor.role == "head" for tensor in found):
        # Gemma's small models have tables for their layers as well, which are no head.
        found += [replace(t, name="lm_head.weight", kind=t.kind and "linear") for t in found if t.role == "embedding"]
    item = _ITEMS[dtype]
    in_panels = panels and dtype != "float32"
    packed = sum(_padded(t) * 2 for t in found if is_linear(t)) if in_panels else 0
    each = COMPACT_BYTES if packed > COMPACT_ABOVE_BYTES else 2.0

    def size(tensor: Tensor) -> int:
        if latents and tensor.name.endswith(_EXPANDS):
            return tensor.values * item
        if not is_linear(tensor) or (tensor.role == "routers" and tensor.kind != "linear" and not routers):
            return tensor.values * item
        fits = whole if tensor.role == "experts" else tensor.shape[-1] % GROUP == 0
        if quantization != "none" and is_rounded(tensor) and fits:
            bits = "int8" if tensor.role == "head" else quantization  # whose errors choose tokens
            return int(_padded(tensor) * _QUANTIZED[bits])
        return int(_padded(tensor) * each) if in_panels else tensor.values * item

    return [replace(tensor, bytes=size(tensor)) for tensor in found]


def is_linear(tensor: Tensor) -> bool:
    """Whether rows are multiplied with it, and it may be packed."""
    if tensor.name.endswith("indexer.weights_proj.weight"):  # left as it is (serve_app/models/loading/optimise.py)
        return False
    if tensor.kind:
        experts = tensor.role == "experts" and len(tensor.shape) == 3
        return tensor.kind != "other" or experts or (tensor.role == "routers" and len(tensor.shape) == 2)
    other = tensor.name.endswith("bias") or ".conv" in tensor.name
    return tensor.role in _LINEARS and len(tensor.shape) >= 2 and not other


def is_rounded(tensor: Tensor) -> bool:
    """Whether a linear's weight is rounded where that is asked for: of routers those that are linears like others."""
    return tensor.kind == "linear" if tensor.kind else tensor.role != "routers"


def _padded(tensor: Tensor) -> int:
    """Values with the rows that fill the last panel; a weight of experts has [experts, outputs, inputs]."""
    *experts, rows, columns = tensor.shape
    count = 1
    for size in experts:
        count *= size
    return count * -(-rows // PANEL) * PANEL * columns
