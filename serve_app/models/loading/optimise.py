"""Load-time replacements that make a model faster; each is checked numerically and left out where it differs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from serve_app.kernels.linear.packed import linear_bytes, pack_linears
from serve_app.kernels.linear.panels import COMPACT_ABOVE_BYTES, PanelStore, panel_library
from serve_app.models.adapters import bank_plug
from serve_app.models.decoders import decoder_parts, device, fused_decoder
from serve_app.models.linears import Plug, chained
from serve_app.models.loading.compare import difference, probe
from serve_app.models.mixtures.coded import takes_codes
from serve_app.models.mixtures.experts import pack_experts
from serve_app.models.mixtures.scaled import pack_scaled, route_scaled
from serve_app.models.quantization import is_quantized

if TYPE_CHECKING:
    from serve_app.models.load import CausalModel

log = logging.getLogger(__name__)

# Root mean square of the difference as a share of the logits'; more than that is a wrong replacement. bfloat16 keeps 8
# bits, and roundings of layers add up like independent errors: random weights in the shape of Llama-3.1-8B differed by
# 0.057 after 32 layers on an H100, though the fused layers round less than transformers' own do.
ALLOWED = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
BFLOAT16_PER_LAYER = 0.02
# A rounding may choose another expert, which changes all that follows in that row; a wrong replacement differs by 1.
# Each linear and norm has been compared by itself before.
ALLOWED_MIXTURE = 0.5
# Linears whose weight transformers' code asks for in each pass, for its dtype, which a packed one would rebuild.
_READ = ("*indexer.weights_proj",)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Where activations are rounded to 8 bits as well, errors of layers add up like independent ones. Measured with random
# weights in float8: 0.14 after 32 layers. A wrong replacement differs by 1 and more.
ALLOWED_QUANTIZED = 0.15
QUANTIZED_PER_LAYER = 0.05


class Differs(Exception):
    """The optimised model is another one; it must be loaded again, as its own weights are gone."""


def optimise(
    model: CausalModel, *, fp8: bool = False, fused: str = "", plug: Plug | None = None, outer: Plug | None = None,
    aside: Iterable[nn.Module] = (),
) -> dict[str, Any]:  # fmt: skip
    """Applies what pays on the model's device and returns a report for the log; with ``fp8`` the linears of the layers
    compute in float8, and a model whose layers can't is a ValueError. ``fused``: why the fused decoder can't be used.
    ``plug`` is asked for the linears of a fused decoder, and ``outer`` for what it and adapters make of them; where
    transformers' forward stays, the caller sees to them. ``aside``: what sees and hears beside the decoder.
    Raises :class:`Differs`.
    """
    started = time.perf_counter()
    size = linear_bytes(model.module)
    expected = probe(model, model.forward)
    report: dict[str, Any] = (
        {"transformers_forward": f"kept: {fused}"} if fused else _use_fused_decoder(model, expected, fp8, plug, outer)
    )
    if fp8 and "fused_decoder" not in report:
        raise ValueError(
            f"the layers can't compute in float8 ({report['transformers_forward']}); set quantization: none"
        )
    on_cpu = model.device.type == "cpu"
    if "fused_decoder" in report:
        if on_cpu:
            _pack_aside(model, aside, size)
    else:
        report.update(_replace_modules(model, expected) if on_cpu else _route_experts(model, expected))
    report["optimise_s"] = round(time.perf_counter() - started, 2)
    return report


def _use_fused_decoder(
    model: CausalModel, expected: Tensor, fp8: bool, plug: Plug | None, outer: Plug | None
) -> dict[str, Any]:
    """The generic layer where the model is built like it and its results agree. Ranks of a model use it together or
    not at all.
    """
    parts: decoder_parts.DecoderParts | None = None
    packed, reason = False, ""
    try:
        parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    except decoder_parts.NotStandard as found:
        reason = str(found)
    except (AttributeError, TypeError, RuntimeError) as failure:
        reason = f"{type(failure).__name__}: {failure}"
    # The C++ pass knows neither float8 weights nor a cache of another dtype than the model's.
    by_device = model.device.type == "cuda" or fp8 or model.kv_shape.dtype != model.dtype
    every = chained(chained(plug, bank_plug(model.adapters)), outer)
    if parts is not None and by_device:
        reason = device.obstacle(parts, fp8=fp8, plug=every) or ""
    try:
        if parts is not None and not reason:
            if by_device:
                built = device.build_forward(parts, model.max_model_len, model.kv_shape.dtype, fp8=fp8, plug=every)
            else:
                built = fused_decoder.build_forward(parts, plug, model.adapters, outer)
            packed = not isinstance(built[0], fused_decoder.FusedForward)
    except Exception as failure:  # those of kernels and compilers have no base in common
        log.warning("the fused layers fail and are not used: %s: %s", type(failure).__name__, failure)
        reason = f"{type(failure).__name__}: {failure}"
    if not model.agree(not reason) or parts is None:
        return {"transformers_forward": f"kept: {reason or 'another rank has to'}"}
    name = built[1]
    try:
        forward = model.shared(built[0])
        if parts.mixtures and not packed:
            pack_experts(model.module)
            for block in parts.blocks.values():
                pack_linears(block)
        error = difference(probe(model, forward), expected)
    except Exception as failure:
        log.warning("the fused layers fail and are not used: %s: %s", type(failure).__name__, failure)
        return {"transformers_forward": f"kept: {type(failure).__name__}: {failure}"}
    allowed = allowed_difference(model, parts.quantized or fp8)
    if not error <= (ALLOWED_MIXTURE if parts.mixtures and model.dtype != torch.float32 else allowed):
        log.warning("the %s differs from the model's own by %.2g and is not used", name, error)
        return {"transformers_forward": f"kept: the {name} differs by {error:.2g}"}
    fused_decoder.free_weights(parts, experts=packed)
    model.forward = forward
    return {"fused_decoder": name, "relative_error": error}


def allowed_difference(model: CausalModel, quantized: bool) -> float:
    """The difference that roundings may make; ``quantized``: those to 8 bits as well."""
    layers = len(model.kv_shape.layers)
    if quantized:
        return allowed_quantized(layers)
    spread = BFLOAT16_PER_LAYER * layers**0.5 if model.dtype == torch.bfloat16 else 0.0
    return max(ALLOWED[model.dtype], spread)


def allowed_quantized(layers: int) -> float:
    """The difference that roundings to 8 bits may make in a model of so many layers."""
    return min(0.5, max(ALLOWED_QUANTIZED, QUANTIZED_PER_LAYER * layers**0.5))


def _pack_aside(model: CausalModel, aside: Iterable[nn.Module], size: int) -> None:
    """Packs what sees and hears beside a fused decoder, as where transformers' forward stays. ``size``: bytes of all of
    the model's linears.
    """
    library = panel_library() if model.dtype == torch.bfloat16 else None
    for child in aside:
        store = None
        if library is not None:
            store = PanelStore(library, linear_bytes(child), compact=size > COMPACT_ABOVE_BYTES)
        pack_linears(child, store=store)
    model.agree(True)  # rank 0 alone has any, and takes its time


def _replace_modules(model: CausalModel, expected: Tensor) -> dict[str, Any]:
    from serve_app.kernels.norm import replace_rms_norms

    library = panel_library() if model.dtype == torch.bfloat16 else None
    store = PanelStore(library, linear_bytes(model.module)) if library is not None else None
    rounded = store is not None and is_quantized(model.module)
    report: dict[str, Any] = {
        "experts": f"packed {pack_experts(model.module, store) + pack_scaled(model.module, store)}",
        "linears": str(pack_linears(model.module, exclude=_READ, store=store)),
        "norms": str(replace_rms_norms(model.module)),
    }
    model.agree(True)  # one may pack longer than another
    error = difference(probe(model, model.forward), expected)
    allowed = allowed_difference(model, rounded)
    if not error <= (ALLOWED_MIXTURE if _is_mixture(model) else allowed):
        raise Differs(f"with packed linears and experts it differs by {error:.2g}")
    return {**report, "relative_error": error}


def _route_experts(model: CausalModel, expected: Tensor) -> dict[str, Any]:
    """On GPUs, where transformers would compute every expert for every row. In plain torch it stays so: that takes
    experts one after the other and waits for the host, which no graph can hold.
    """
    done = route_scaled(model.module) if takes_codes(model.device) else 0
    if model.agree(not done):
        return {}
    error = difference(probe(model, model.forward), expected)
    if not error <= (ALLOWED_MIXTURE if model.dtype != torch.float32 else allowed_difference(model, False)):
        raise Differs(f"with experts by their numbers it differs by {error:.2g}")
    return {"experts": f"{done} by their numbers", "relative_error": error}


def _is_mixture(model: CausalModel) -> bool:
    config: Any = model.module.config.get_text_config()  # type: ignore[union-attr, operator]
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)
