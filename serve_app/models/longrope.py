"""Rotary embeddings with two sets of frequencies: the length of a request's own text chooses, never its batch.

LongRoPE (arXiv 2402.13753) rotates texts beyond the original context with other factors, all their positions alike.
transformers chooses once for a whole batch, by its largest position. Here each token brings its choice: position ids
are ``2 * position + extended``, so the data says all there is to know, in any batch and at any step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class LengthRotary(nn.Module):
    """Stands for a rotary module: cos and sin of tokens that say themselves which frequencies are theirs.

    With ``keeps`` keys stay as they were when their text passes the original length, as ``generate`` has it for models
    without a rule of their own; tokens beyond it are extended by their position.
    """

    def __init__(self, original: Any, length: int, keeps: bool) -> None:
        super().__init__()
        self.length, self.keeps = length, keeps
        self.short, self.long = _fixed(original, extended=False), _fixed(original, extended=True)
        self.rope_type = "longrope"

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        positions, extended = position_ids >> 1, (position_ids & 1).bool()
        if self.keeps:
            extended = extended | (positions >= self.length)
        short, long = (m(x, positions, *args, **kwargs) for m in (self.short, self.long))
        chosen = extended[..., None]
        return torch.where(chosen, long[0], short[0]), torch.where(chosen, long[1], short[1])


def coded(positions: Tensor, extended: Tensor | None) -> Tensor:
    """Position ids [..., T] int64 for :class:`LengthRotary`; ``extended`` [T] bool or None for no token."""
    return positions * 2 if extended is None else positions * 2 + extended.to(positions.dtype)


def replace_rotary(module: Any, *, generates: bool) -> int | None:
    """Puts :class:`LengthRotary` in the place of each rotary module of that kind; returns the original length, or None
    where there is none. Raises ValueError for one that can't be told by length alone.
    """
    lengths: set[int] = set()
    keeps = generates and not recomputes(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if "longrope" not in _types(child) or isinstance(parent, LengthRotary):
                continue
            length = _original_length(child)
            setattr(parent, name, LengthRotary(child, length, keeps))
            lengths.add(length)
    if len(lengths) > 1:
        raise ValueError(f"rotary embeddings of several original lengths ({sorted(lengths)}) are not supported")
    return lengths.pop() if lengths else None


def recomputes(module: Any) -> bool:
    """Whether ``generate`` computes a text anew when it passes the original length."""
    from transformers import GenerationMixin

    own = type(module).__dict__.get("prepare_inputs_for_generation")
    # Phi-3's rule, which looks for the length here and not in the rotary parameters.
    named = hasattr(module.config, "original_max_position_embeddings")
    return own is not None and own is not GenerationMixin.prepare_inputs_for_generation and named


def _types(module: nn.Module) -> set[str]:
    kind: Any = getattr(module, "rope_type", None)
    return set(kind.values()) if isinstance(kind, dict) else {kind} if isinstance(kind, str) else set()


def _original_length(module: Any) -> int:
    found = module.config.rope_parameters
    values = [found] if "rope_type" in found else [v for v in found.values() if v and v.get("rope_type") == "longrope"]
    lengths = {int(v["original_max_position_embeddings"]) for v in values}
    if len(lengths) != 1:
        raise ValueError(f"rotary embeddings of several original lengths ({sorted(lengths)}) are not supported")
    return lengths.pop()


def _fixed(module: Any, *, extended: bool) -> Any:
    """A copy that always has the frequencies of long, or of short texts."""
    fixed = copy.deepcopy(module)
    kinds = fixed.rope_type if isinstance(fixed.rope_type, dict) else {None: fixed.rope_type}
    for layer_type, kind in kinds.items():
        if kind != "longrope":
            continue
        prefix = f"{layer_type}_" if layer_type is not None else ""
        inv_freq = getattr(fixed, f"{prefix}original_inv_freq")
        if extended:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            options = {} if layer_type is None else {"layer_type": layer_type}
            length = _original_length(module) + 1
            inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](fixed.config, inv_freq.device, seq_len=length, **options)
        setattr(fixed, f"{prefix}inv_freq", inv_freq.clone())
        values = fixed.config.rope_parameters if layer_type is None else fixed.config.rope_parameters[layer_type]
        if "long_mscale" in values:  # Phi-3.5-MoE: a factor of cos and sin, whatever the frequencies are
            values["long_mscale"] = values["short_mscale"] = values["long_mscale" if extended else "short_mscale"]
    # Under any other name the module's forward leaves the frequencies alone.
    fixed.rope_type = {k: _plain(v) for k, v in kinds.items()} if isinstance(fixed.rope_type, dict) else "default"
    return fixed


def _plain(kind: str) -> str:
    return "default" if kind == "longrope" else kind
