"""The seam between transformers' modelling code and our paged cache.

transformers calls a registered function for every attention layer and hands down unknown keyword arguments of
``model(...)``; so the :class:`~serve_app.engine.step.Batch` arrives as ``batch=`` and nothing is global.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serve_app.kernels.attention import paged_attention, write_kv

NAME = "serve_app_paged"


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the batch's K/V into its blocks, then attends.

    ``query`` [1, Hq, T, D], ``key`` and ``value`` [1, Hkv, T, D]; returns [1, T, Hq, D]. There is never a mask:
    causality, window and request borders follow from the batch.
    """
    layer = batch.kv.layer(module.layer_idx)
    write_kv(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), batch.slots)
    out = paged_attention(
        query[0].transpose(0, 1),
        layer,
        batch,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Makes the function known to transformers as ``attn_implementation="serve_app_paged"``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention_forward)
