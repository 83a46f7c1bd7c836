"""Latent attention: the latent lies in the cache, and not the keys and values that every head makes of it.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) computes keys and values of all heads from one latent of a token, beside a
small rotated key that heads share. The products that make them can be taken into queries and outputs instead
("absorbed"), so that attention runs over the latents as over one head's keys, whose first columns are its values::

    score = q_nope . (U_k c) + q_rot . k_rot = [U_k^T q_nope, q_rot] . [c, k_rot]        out = U_v (sum of weight * c)

transformers' modules expand the latent in one method, which is replaced here; the check at load compares the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Latent:
    """The expansion of one attention module: ``keys`` [heads, nope, rank], ``values`` [heads, v, rank]."""

    keys: Tensor
    values: Tensor

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [1, heads, T, nope + rotated] as they meet latents: [1, heads, T, rank + rotated]."""
        nope = self.keys.shape[1]
        return torch.cat([torch.matmul(query[0, ..., :nope], self.keys), query[0, ..., nope:]], -1).unsqueeze(0)

    def expand(self, out: Tensor) -> Tensor:
        """Sums of latents [T, heads, rank or more] as heads' outputs [T, heads, v]."""
        latents = out[..., : self.values.shape[2]].transpose(0, 1)
        return torch.matmul(latents, self.values.transpose(1, 2)).transpose(0, 1)


def use_latents(module: nn.Module) -> int:
    """Has every module that expands a latent keep it; returns how many do. Their own expansions are freed."""
    done = 0
    for child in list(module.modules()):
        if (latent := _read(child)) is None:
            continue
        owner: Any = child
        owner.latent, owner.kv_b_proj = latent, None
        owner.expand_kv = MethodType(_kept, owner)
        done += 1
    return done


def has_latents(module: nn.Module) -> bool:
    """Whether :func:`use_latents` would change it."""
    return any(_read(child) is not None for child in module.modules())


def latent_of(module: nn.Module) -> Latent | None:
    """What :func:`use_latents` has put there."""
    return getattr(module, "latent", None)


def _kept(self: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of ``expand_kv``: [1, 1, T, rank] and [1, 1, T, rotated] as one head's keys and values."""
    return torch.cat([latent, rotated], -1), latent


def _read(child: Any) -> Latent | None:
    linear = getattr(child, "kv_b_proj", None)
    if not hasattr(child, "expand_kv") or type(linear) is not nn.Linear or linear.bias is not None:
        return None
    nope, width = child.qk_nope_head_dim, child.qk_nope_head_dim + child.v_head_dim
    if linear.out_features % width:
        return None
    weight = linear.weight.detach().view(-1, width, linear.in_features)
    return Latent(weight[:, :nope].contiguous(), weight[:, nope:].contiguous())
