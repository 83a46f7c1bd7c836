"""The experts of a mixture on CPUs, on weights that are laid out once.

transformers calls a registered function for the experts of every mixture, as it does for attention. Its own functions
read row-major weights of all experts on every call; with a few rows per step most of the time goes there. Here the
experts that rows have chosen are two calls into C++ where their weights lie in panels, and elsewhere, one after the
other, two linears each on weights in oneDNN's blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.kernels.linear.packed import TOLERANCE_QUANTIZED, PackedLinear, packing_available
from serve_app.kernels.linear.panels import PanelLinears, PanelStore, panel_library
from serve_app.kernels.linear.quantize import Quantized
from serve_app.models.quantization import codes_of_experts

NAME = "serve_app_experts"
log = logging.getLogger(__name__)
# Largest difference from F.linear, as a share of the largest output.
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


# (rows [T, k] or [P, k], expert of each pair [P]) -> [P, n]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class PackedExperts:
    """Both products of one layer's experts."""

    up: Product
    down: Product
    count: int


class ExpertLinears:
    """Linears of one shape in oneDNN's blocks, each for the pairs of a row and an expert that are its own."""

    def __init__(self, linears: list[PackedLinear]) -> None:
        self.linears = linears

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As :class:`~serve_app.kernels.linear.panels.PanelLinears`."""
        choices = len(chosen) // max(1, len(x))
        order = chosen.argsort(stable=True)
        rows = x[order // choices]
        out = torch.empty(len(chosen), self.linears[0].out_features, dtype=x.dtype)
        at = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=len(self.linears)).tolist()):
            if count:
                out[order[at : at + count]] = self.linears[expert](rows[at : at + count])
                at += count
        return out


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Rows [T, H] through the experts ``top_k_index`` [T, K], weighted by ``top_k_weights`` [T, K] -> [T, H]."""
    packed: PackedExperts | None = getattr(module, "packed_experts", None)
    if packed is None:
        if not fits_grouped(module):
            return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return through(module, packed, hidden_states, top_k_index, top_k_weights)


def through(
    module: Any, experts: PackedExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As :func:`experts_forward`, by ``experts``."""
    tokens, choices = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    inner = experts.up(hidden_states, chosen)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = experts.down(inner, chosen)
    # As transformers has it: a sum over the choices of each row, in their order.
    weighted = out * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, choices, out.shape[-1]).sum(1).to(hidden_states.dtype)


def fits_grouped(module: nn.Module) -> bool:
    """Whether torch's grouped product takes the experts' weights: it wants strides of a multiple of 16 bytes."""
    weights = [w for w in module.parameters(recurse=False) if w.ndim == 3]
    return all(size * w.element_size() % 16 == 0 for w in weights for size in w.shape[1:])


def leave_odd_experts(model: nn.Module) -> None:
    """Experts whose weights torch's grouped product does not take run one after the other, as their classes are
    written."""
    for child in model.modules():
        if hasattr(child, "_apply_gate") and not fits_grouped(child):
            child.config._experts_implementation_internal = "eager"  # type: ignore[union-attr]


def pack_experts(model: nn.Module, store: PanelStore | None = None) -> int:
    """Packs the experts of a model on the CPU, into ``store`` where there is one, and frees their own weights; returns
    how many. Modules of another form than transformers' experts stay as they are."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    done = 0
    for child in model.modules():
        if not _standard(child):
            continue
        packed = _pack(child, store)
        if packed is None:
            continue
        owner: Any = child
        owner.packed_experts = packed
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if isinstance(getattr(owner, name, None), nn.Parameter):
                setattr(owner, name, None)
        owner.config._experts_implementation_internal = NAME
        owner.expert_codes = None
        done += packed.count
    return done


def _standard(module: Any) -> bool:
    """Whether the module is built by transformers' ``use_experts_implementation``, with nothing behind its experts."""
    if getattr(module, "has_post_expert_norm", True) or not hasattr(module, "_apply_gate"):
        return False
    weights = (getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None), module.down_proj)
    return all(
        isinstance(w, nn.Parameter) and w.ndim == 3 and w.device.type == "cpu" and packing_available(w.dtype)
        for w in weights
    )


@dataclass(slots=True)
class ExpertWeights:
    """``weights`` [E, n, k] and their biases; ``codes``, if there, are the same in fewer bits."""

    weights: Tensor
    biases: Sequence[Tensor | None]
    codes: list[Quantized] | None = None


@torch.inference_mode()
def _pack(module: Any, store: PanelStore | None) -> PackedExperts | None:
    known = panel_library(quantized=True) is not None

    def linears(name: str) -> ExpertWeights:
        weights = getattr(module, name).detach()
        biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
        codes = codes_of_experts(module, name) if known else None
        return ExpertWeights(weights.transpose(1, 2) if module.is_transposed else weights, biases, codes)

    return pack_products(linears("gate_up_proj" if module.has_gate else "up_proj"), linears("down_proj"), store)


def pack_products(up: ExpertWeights, down: ExpertWeights, store: PanelStore | None) -> PackedExperts | None:
    """None where what is packed does not agree with the weights."""
    for way in (store, None) if store is not None else (None,):
        try:
            first, second = _product(up, way), _product(down, way)
        except (RuntimeError, ValueError) as error:
            log.info("packing experts failed: %s", error)
            continue
        if first is not None and second is not None:
            return PackedExperts(first, second, len(up.weights))
    return None


def _product(of: ExpertWeights, store: PanelStore | None) -> Product | None:
    """None where the first expert's linear does not agree with the weights it was made of."""
    weights, biases, tolerance = of.weights, of.biases, _TOLERANCE[of.weights.dtype]
    product: Product
    if store is not None and weights.dtype is torch.bfloat16:
        product = PanelLinears(store, of.codes or list(weights), list(biases))
        tolerance = TOLERANCE_QUANTIZED if of.codes else tolerance
    else:
        product = ExpertLinears([PackedLinear(w, b) for w, b in zip(weights, biases, strict=True)])
    x = torch.randn(3, weights.shape[2], generator=torch.Generator().manual_seed(0)).to(weights.dtype)
    want = F.linear(x, weights[0].contiguous(), biases[0]).float()
    limit = tolerance * float(want.abs().max()) + 1e-30
    found = product(x, torch.zeros(3, dtype=torch.int64)).float()
    return product if float((found - want).abs().max()) <= limit else None
