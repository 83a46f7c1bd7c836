"""Reads a mixture off transformers' modules: its router's rule, its experts' weights and their gate.

Rules are found by trying: a router runs on a few rows, and the rule that gives its indices and weights is the one. What
none of them gives keeps transformers' forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.kernels.decoder import LinearWeight
from serve_app.kernels.mixture import CHOSEN_NORMALISED, CHOSEN_OF_ALL, Gate, MixtureWeight, choose

_BLOCK = {"gate", "router", "experts"}
_TRIED = 16  # rows


class NotRouted(ValueError):
    """The mixture computes something else than the C++ pass; the text names the first part that differs."""


def is_mixture(mlp: nn.Module) -> bool:
    return hasattr(mlp, "experts")


@torch.inference_mode()
def read_mixture(block: Any) -> MixtureWeight:
    """Raises :class:`NotRouted`."""
    unknown = {name for name, _ in block.named_children()} - _BLOCK
    own = {name for name, _ in block.named_parameters(recurse=False)}
    if unknown or own:
        raise NotRouted(f"{type(block).__name__} has {', '.join(sorted(unknown | own))}")
    router: Any = getattr(block, "gate", None) or getattr(block, "router", None)
    weight, bias = getattr(router, "weight", None), getattr(router, "bias", None)
    if router is None or not isinstance(weight, Tensor) or weight.ndim != 2 or next(router.children(), None):
        raise NotRouted(f"{type(block).__name__} has no plain router")
    experts = block.experts
    if not hasattr(experts, "_apply_gate") or not experts.has_gate or getattr(experts, "has_post_expert_norm", True):
        raise NotRouted(f"{type(experts).__name__} is not built as transformers' other experts")
    chosen, routing, rounded = _rule(router, weight, bias)
    gate_up, down = _weights(experts, "gate_up_proj"), _weights(experts, "down_proj")
    found = MixtureWeight(
        router=LinearWeight([weight.detach()], [bias.detach()] if isinstance(bias, Tensor) else []),
        gate_up=[_halves(w, b, experts.is_concatenated) for w, b in gate_up],
        down=[LinearWeight([w], [] if b is None else [b]) for w, b in down],
        chosen=chosen, routing=routing, rounded=rounded, gate=_gate(experts),
    )  # fmt: skip
    return found


def _rule(router: Any, weight: Tensor, bias: Any) -> tuple[int, int, bool]:
    """How many experts a row chooses, by which rule, and whether their weights have the rows' dtype."""
    x = torch.randn(_TRIED, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    # Random routers choose clearly, and a trained one's weights stay as they are.
    found = router(x)
    tensors = [t for t in found if isinstance(t, Tensor)] if isinstance(found, tuple) else []
    indices = [t for t in tensors if not t.is_floating_point() and t.ndim == 2]
    if len(indices) != 1:
        raise NotRouted(f"{type(router).__name__} names no experts")
    [index] = indices
    scores = [t for t in tensors if t.is_floating_point() and t.shape == index.shape]
    if not scores:
        raise NotRouted(f"{type(router).__name__} gives no weights of experts")
    logits = F.linear(x, weight, bias if isinstance(bias, Tensor) else None)
    for routing in (CHOSEN_NORMALISED, CHOSEN_OF_ALL):
        weights, own = choose(logits, index.shape[1], routing)
        order, mine = index.argsort(-1), own.argsort(-1)
        if not torch.equal(index.gather(1, order), own.gather(1, mine)):
            continue
        if torch.allclose(scores[-1].float().gather(1, order), weights.gather(1, mine), rtol=0.02, atol=1e-4):
            return index.shape[1], routing, scores[-1].dtype != torch.float32
    raise NotRouted(f"{type(router).__name__} chooses by a rule of its own")


def _weights(experts: Any, name: str) -> list[tuple[Tensor, Tensor | None]]:
    """[n, k] and bias [n] or None of each expert."""
    weights = getattr(experts, name).detach()
    weights = weights.transpose(1, 2) if experts.is_transposed else weights
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    return list(zip(weights, biases, strict=True))


def _halves(weight: Tensor, bias: Tensor | None, concatenated: bool) -> LinearWeight:
    """Gates, then ups."""
    parts = list(weight.chunk(2)) if concatenated else [weight[0::2], weight[1::2]]
    if bias is None:
        return LinearWeight(parts)
    return LinearWeight(parts, list(bias.chunk(2)) if concatenated else [bias[0::2], bias[1::2]])


def _gate(experts: Any) -> Gate:
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
