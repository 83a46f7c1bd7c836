"""Reads a mixture off transformers' modules: its router's rule, its experts' weights and their gate.

Rules are found by trying: a router runs on a few rows, and the rule that gives its indices and weights is the one. What
none of them gives keeps transformers' forward, and so does a block that computes something else with its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.kernels.decoder import LinearWeight
from serve_app.kernels.linear.quantize import GROUP, Quantized
from serve_app.kernels.mixture import (
    CHOSEN_NORMALISED,
    CHOSEN_OF_ALL,
    SIGMOID,
    SIGMOID_NORMALISED,
    Gate,
    MixtureWeight,
    Routing,
    choose,
)
from serve_app.kernels.reference.experts import mix_experts
from serve_app.models.quantization import codes_of, codes_of_experts

_ROUTERS, _SHARED = ("gate", "router"), ("shared_experts", "shared_expert")
_SHARED_GATE, _CORRECTION = "shared_expert_gate", "e_score_correction_bias"
_BLOCK = {*_ROUTERS, *_SHARED, _SHARED_GATE, "experts"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn", "activation_fn"}
_TRIED = 64  # rows
# The root mean square of what a block's own result may differ by, as a share of it: roundings to bfloat16.
_ALLOWED = 0.03


class NotRouted(ValueError):
    """The mixture computes something else than the C++ pass; the text names the first part that differs."""


def is_mixture(mlp: nn.Module) -> bool:
    return hasattr(mlp, "experts")


@torch.inference_mode()
def read_mixture(block: Any) -> MixtureWeight:
    """Raises :class:`NotRouted`."""
    unknown = {name for name, child in block.named_children() if child is not None} - _BLOCK
    own = {name for name, _ in block.named_parameters(recurse=False)}
    if unknown or own:
        raise NotRouted(f"{type(block).__name__} has {', '.join(sorted(unknown | own))}")
    router = _child(block, *_ROUTERS)
    weight, bias = getattr(router, "weight", None), getattr(router, "bias", None)
    if router is None or not isinstance(weight, Tensor) or weight.ndim != 2 or type(router) is nn.Linear:
        raise NotRouted(f"{type(block).__name__} has no router that names experts")
    experts = block.experts
    if not hasattr(experts, "_apply_gate") or not experts.has_gate or getattr(experts, "has_post_expert_norm", True):
        raise NotRouted(f"{type(experts).__name__} is not built as transformers' other experts")
    routing = _rule(router, weight, bias)
    coded = getattr(experts, "coded", None)
    gate_up, down = ([] if coded else _weights(experts, name) for name in ("gate_up_proj", "down_proj"))
    found = MixtureWeight(
        router=LinearWeight([weight.detach()], [bias.detach()] if isinstance(bias, Tensor) else []),
        gate_up=[_halves(w, b, codes, experts.is_concatenated) for w, b, codes in gate_up],
        down=[LinearWeight([w], [] if b is None else [b], codes) for w, b, codes in down],
        routing=routing, gate=gate_of(experts), coded=coded,
    )  # fmt: skip
    if (shared := _child(block, *_SHARED)) is not None:
        _add_shared(found, shared, _child(block, _SHARED_GATE))
        _compare(block, found)
    return found


def _child(module: nn.Module, *names: str) -> Any:
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _rule(router: Any, weight: Tensor, bias: Any) -> Routing:
    x = torch.randn(_TRIED, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    # Random routers choose clearly, and a trained one's weights stay as they are.
    try:
        found = router(x)
    except TypeError as error:  # it is given more than rows
        raise NotRouted(f"{type(router).__name__} takes more than rows") from error
    tensors = [t for t in found if isinstance(t, Tensor)] if isinstance(found, tuple) else []
    indices = [t for t in tensors if not t.is_floating_point() and t.ndim == 2]
    if len(indices) != 1:
        raise NotRouted(f"{type(router).__name__} names no experts")
    [index] = indices
    scores = [t for t in tensors if t.is_floating_point() and t.shape == index.shape]
    if not scores:
        raise NotRouted(f"{type(router).__name__} gives no weights of experts")
    logits = F.linear(x, weight, bias if isinstance(bias, Tensor) else None)
    exact = F.linear(x.float(), weight.float(), bias.float() if isinstance(bias, Tensor) else None)
    order = index.argsort(-1)
    for routing in _rules(router, index.shape[1], rounded=scores[-1].dtype != torch.float32):
        weights, own = choose(exact if routing.exact else logits, routing)
        mine = own.argsort(-1)
        # Of equal scores, which rounding makes, any may be chosen.
        same = (index.gather(1, order) == own.gather(1, mine)).all(1)
        if same.float().mean() < (1 if logits.dtype is torch.float32 else 0.9):
            continue
        told, made = scores[-1].float().gather(1, order)[same], weights.gather(1, mine)[same]
        if torch.allclose(told, made, rtol=0.02, atol=1e-4):
            return routing
    raise NotRouted(f"{type(router).__name__} chooses by a rule of its own")


def _rules(router: Any, chosen: int, *, rounded: bool) -> Iterator[Routing]:
    """Those that a router may have, the usual ones first."""
    correction = next(
        (t.detach().float().reshape(-1) for name, t in router.named_buffers() if _CORRECTION in name), None
    )
    if correction is None:
        named = (t for name, t in router.named_parameters() if _CORRECTION in name)
        correction = next((t.detach().float().reshape(-1) for t in named), None)
    groups, kept = (int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group"))
    scale = float(getattr(router, "routed_scaling_factor", None) or 1.0)
    experts = len(router.weight)
    if experts % groups or experts // groups < 2:
        groups = kept = 1
    for exact in (False, True):
        for kind in (CHOSEN_NORMALISED, CHOSEN_OF_ALL, SIGMOID_NORMALISED, SIGMOID):
            for factor in dict.fromkeys((1.0, scale)):
                yield Routing(chosen, kind, rounded, exact, factor, correction, groups, kept)


def _add_shared(found: MixtureWeight, shared: Any, gate: Any) -> None:
    """A shared expert becomes as many as it is wider than the others: their sum is the same."""
    unknown = {name for name, _ in shared.named_children()} - _MLP
    linears: list[Any] = [getattr(shared, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if unknown or any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        raise NotRouted(f"{type(shared).__name__} is not three linears without biases")
    gates, ups, downs = (linear.weight.detach() for linear in linears)
    width, missing = found.inner, -len(gates) % found.inner
    gates, ups = F.pad(gates, (0, 0, 0, missing)), F.pad(ups, (0, 0, 0, missing))
    downs = F.pad(downs, (0, missing))
    codes = [codes_of(linear) for linear in linears]
    coded = all(codes) and not missing and width % GROUP == 0 and found.coded is None and found.gate_up[0].quantized
    if not coded:  # all experts of a mixture have as many bits
        for linear in (*found.gate_up, *found.down):
            linear.quantized = []
    for at in range(0, len(gates), width):
        rows = slice(at, at + width)
        gate_codes = [each[0].part(rows) for each in codes[:2]] if coded else []
        down_codes = [codes[2][0].part(slice(None), rows)] if coded else []
        found.gate_up.append(LinearWeight([gates[rows], ups[rows]], [], gate_codes))
        found.down.append(LinearWeight([downs[:, rows]], [], down_codes))
        found.shared += 1
    if gate is not None:
        if type(gate) is not nn.Linear or gate.bias is not None or len(gate.weight) != 1 or found.router.biases:
            raise NotRouted("the shared expert's gate is not one row without a bias")
        found.router.parts.append(gate.weight.detach())
        found.gated = True


def _compare(block: Any, found: MixtureWeight) -> None:
    """How a block puts its parts together is seen from what it gives."""
    router = found.router.parts[0]
    x = torch.randn(2, router.shape[1], generator=torch.Generator().manual_seed(1)).to(router)
    told = block(x[None])
    told = (told[0] if isinstance(told, tuple) else told).reshape(len(x), -1).float()
    made = mixed(found, x)
    if not (told - made).square().mean().sqrt() <= _ALLOWED * told.square().mean().sqrt():
        raise NotRouted(f"{type(block).__name__} computes something else with its experts")


def mixed(weight: MixtureWeight, x: Tensor) -> Tensor:
    """What rows [T, H] get of a mixture, float32, as the C++ pass computes it."""
    routing = weight.routing
    bias = weight.router.biases[0] if weight.router.biases else None
    logits = F.linear(x.float(), weight.router.parts[0].float(), None if bias is None else bias.float())
    shares, index = choose(logits if routing.exact else logits.to(x.dtype), routing)
    experts, coded = weight.routed, weight.coded
    more = torch.arange(experts, experts + weight.shared, device=x.device).expand(len(x), -1)
    share = F.linear(x, weight.router.parts[1]).sigmoid().float() if weight.gated else shares.new_ones(len(x), 1)
    shares, index = torch.cat([shares, share.expand(-1, weight.shared)], 1), torch.cat([index, more], 1)
    out = torch.zeros(x.shape, device=x.device)
    for row in range(len(x)):
        for one, expert in zip(shares[row], index[row].tolist(), strict=True):
            if coded is not None and expert < experts:
                out[row] += mix_experts(x[row, None], index.new_tensor([[expert]]), one.view(1, 1), coded)[0].float()
                continue
            at = expert if coded is None else expert - experts
            gate_up, down = weight.gate_up[at], weight.down[at]
            gates, ups = F.linear(x[row], torch.cat(gate_up.parts), _joined(gate_up.biases)).chunk(2)
            inner = weight.gate(gates.float(), ups.float()).to(x.dtype)
            out[row] += one * F.linear(inner, down.parts[0], _joined(down.biases)).float()
    return out


def _joined(biases: list[Tensor]) -> Tensor | None:
    return torch.cat(biases) if biases else None


def _weights(experts: Any, name: str) -> list[tuple[Tensor, Tensor | None, list[Quantized]]]:
    """Of each expert [n, k], the bias [n] or None, and the codes of a weight that was rounded."""
    weights = getattr(experts, name).detach()
    weights = weights.transpose(1, 2) if experts.is_transposed else weights
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    codes = [[each] for each in codes_of_experts(experts, name)] or [[] for _ in weights]
    return list(zip(weights, biases, codes, strict=True))


def _halves(weight: Tensor, bias: Tensor | None, codes: list[Quantized], concatenated: bool) -> LinearWeight:
    """Gates, then ups."""
    half = len(weight) // 2
    gates, ups = (slice(half), slice(half, None)) if concatenated else (slice(0, None, 2), slice(1, None, 2))
    return LinearWeight(
        [weight[gates], weight[ups]],
        [] if bias is None else [bias[gates], bias[ups]],
        [each.part(rows) for each in codes for rows in (gates, ups)],
    )


def gate_of(experts: Any) -> Gate:
    """What experts make of gates and ups. Raises :class:`NotRouted`."""
    x = torch.linspace(-12, 12, 64 * 2).roll(37).view(2, 64)
    joined = torch.cat([x[0], x[1]]) if experts.is_concatenated else torch.stack([x[0], x[1]], 1).flatten()
    found = experts._apply_gate(joined[None])[0]
    limit = getattr(experts, "limit", None)
    known = [Gate()]
    if isinstance(limit, float):
        known.append(Gate(float(getattr(experts, "alpha", 0.0)), limit))
    for gate in known:
        if torch.allclose(found, gate(x[0], x[1]), rtol=1e-4, atol=1e-4):
            return gate
    raise NotRouted(f"{type(experts).__name__} has a gate of its own")
