"""The seam between transformers' modelling code and our paged cache.

transformers calls a registered function for every attention layer and hands down unknown keyword arguments of
``model(...)``; so the :class:`~serve_app.engine.step.Batch` arrives as ``batch=`` and nothing is global. For models
whose layers do not hand arguments down, the model's own :class:`Carrier` holds it while its forward runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.chosen import chosen_attention
from serve_app.models.chunked import chunked_attention
from serve_app.models.latent import latent_of
from serve_app.models.spanned import spanned_attention

NAME = "serve_app_paged"


@dataclass(slots=True)
class Carrier:
    """Holds the batch of one model's running forward pass, and what its layers have worked out of it alike."""

    batch: Any = None
    plans: dict[Any, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """The pass is over."""
        self.batch = None
        self.plans.clear()


@dataclass(slots=True)
class PagedLayer:
    """What the loader found out about one attention module; its attribute ``paged_layer``.

    ``index`` is its layer of the cache. ``chunk``: keys are those of the query's own chunk of so many positions (0:
    all). ``temperature``: (floor, scale) of queries that grow with their position, after Llama 4.
    """

    index: int
    chunk: int = 0
    temperature: tuple[float, float] | None = None
    carrier: Carrier = field(default_factory=Carrier)


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the batch's K/V into its blocks, then attends.

    ``query`` [1, Hq, T, D], ``key`` [1, Hkv, T, D] and ``value`` [1, Hkv, T, Dv]; returns [1, T, Hq, Dv]. There is
    never a mask: causality, window, chunks and request borders follow from the batch. Raises ValueError for keys and
    values that the cache was not made for. ``indices`` [1, T, K] int32 are the keys that an indexer has chosen
    (:mod:`serve_app.models.indexed`); K is 0 where these are all.
    """
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    batch = layer.carrier.batch if batch is None else batch
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    cache = batch.kv.layer(layer.index)
    latent = latent_of(module)
    if latent is not None:
        query = latent.absorb(query)
    width = value.shape[-1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if layer.temperature is not None:
        q = q * _temperature(batch.positions, *layer.temperature).to(q.dtype)
    if latent is None and (k.shape != v.shape or k.shape[1:] != (cache.shape[-3], cache.shape[-1])):
        q, k, v = fit(q, k, v, cache.shape[-3], cache.shape[-1])
    write_kv(cache, k, v, batch.slots)
    options: dict[str, Any] = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    chosen = indices if indices is not None else _chosen(attention_mask)
    beside = getattr(module, "beside", None)
    if beside is not None:  # entries that stand for what is before the window (serve_app.models.compressed)
        out = beside.attend(q, cache, batch, window=sliding_window, scale=scale, sinks=s_aux)
    elif chosen is not None and chosen.shape[-1]:
        out = chosen_attention(q, cache, batch, chosen[0], scale=scale, softcap=softcap, sinks=s_aux)
    elif batch.ends is not None:
        out = spanned_attention(q, cache, batch, **options)
    elif layer.chunk and batch.max_seq_len > layer.chunk:
        out = chunked_attention(q, cache, batch, layer.chunk, **options)
    else:
        out = paged_attention(q, cache, batch, **options)
    if latent is not None:
        return latent.expand(out).unsqueeze(0), None
    return out[..., :width].unsqueeze(0), None


def _chosen(mask: Tensor | None) -> Tensor | None:
    """What an indexer has chosen, of families that hand it down where masks are."""
    return mask if mask is not None and mask.dtype == torch.int32 else None


def fit(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a cache of ``kv_heads`` and ``head_dim`` takes them: the narrower of keys and values
    end in zeros, which change no product. Raises ValueError where that is not all that differs.
    """
    if (
        k.shape[1] != kv_heads or v.shape[1] != kv_heads or not len(q) == len(k) == len(v)
        or q.shape[-1] != k.shape[-1] or max(k.shape[-1], v.shape[-1]) > head_dim
    ):  # fmt: skip
        raise ValueError(
            f"attention has queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)}; the cache holds "
            f"{kv_heads} heads of {head_dim}"
        )
    q, k, v = (F.pad(x, (0, head_dim - x.shape[-1])) if x.shape[-1] != head_dim else x for x in (q, k, v))
    return q, k, v


def _temperature(positions: Tensor, floor: float, scale: float) -> Tensor:
    """Llama 4's factor of queries without rotation (arXiv 2501.19399), float32 [T, 1, 1]."""
    return (torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0).view(-1, 1, 1)


def register() -> None:
    """Makes the function known to transformers as ``attn_implementation="serve_app_paged"``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention_forward)
