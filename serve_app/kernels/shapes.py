"""Shapes that come from a model's folder, compared before compiled code follows them.

The cache is made from ``config.json``, keys and values come from modules with weights: one of them may lie. Each check
is a few comparisons of integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serve_app.kernels.batch import BLOCK, AttentionBatch

if TYPE_CHECKING:
    from serve_app.kernels.decoder import DecoderLayer, DecoderShape, LinearWeight, NormWeight
    from serve_app.kernels.mixture import MixtureWeight


class ShapeMismatch(ValueError):
    """Tensors do not fit each other or the cache. The text gives both sizes and what to correct."""


def check_rows(kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Keys and values come from a model whose sizes its configuration may misstate; the cache was made from that."""
    rows = (slots.shape[0], kv_layer.shape[2], kv_layer.shape[4])
    if k.shape != rows or v.shape != rows:
        raise ShapeMismatch(
            f"the model gives keys {list(k.shape)} and values {list(v.shape)}, and the cache made from its config.json "
            f"takes {list(rows)} (tokens, K/V heads, head size); correct num_key_value_heads and head_dim there, or "
            "use an architecture whose keys and values have one size"
        )


def check_queries(q: Tensor, kv_layer: Tensor, batch: AttentionBatch, sinks: Tensor | None) -> None:
    _, heads, dim = q.shape
    _, _, kv_heads, _, kv_dim = kv_layer.shape
    if dim != kv_dim or heads % kv_heads or (sinks is not None and sinks.shape != (heads,)):
        of_sinks = "" if sinks is None else f" with sinks {list(sinks.shape)}"
        raise ShapeMismatch(
            f"the model asks with {heads} heads of {dim}{of_sinks}, and the cache made from its config.json has "
            f"{kv_heads} of {kv_dim}; correct num_attention_heads, num_key_value_heads and head_dim there"
        )
    requests = batch.seq_lens.shape[0]
    if batch.query_start.shape[0] != requests + 1 or batch.block_tables.shape[0] != requests:
        raise ShapeMismatch(
            f"the batch has {requests} lengths, {batch.query_start.shape[0]} borders and {batch.block_tables.shape[0]} "
            "block tables; build it with engine.step.build_batch"
        )


def check_decoder(
    shape: DecoderShape, embedding: Tensor, layers: list[DecoderLayer], final_norm: NormWeight, head: LinearWeight
) -> None:
    """Compares every weight of a decoder with its ``shape``, once, before they are packed or fused."""
    queries, keys = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    _equal("the embedding", embedding.shape, (shape.vocab, shape.hidden))
    for index, layer in enumerate(layers):
        for name, linear, wanted in (
            ("qkv", layer.qkv, (queries + 2 * keys, shape.hidden)),
            ("o", layer.o, (shape.hidden, queries)),
            ("gate_up", layer.gate_up, (2 * shape.inner, shape.hidden)),
            ("down", layer.down, (shape.hidden, shape.inner)),
        ):
            if linear is not None:
                _check_linear(f"layer {index}'s {name}", linear, wanted)
        if layer.mixture is not None:
            check_mixture(f"layer {index}", layer.mixture, shape.hidden)
        elif layer.gate_up is None or layer.down is None:
            raise ShapeMismatch(f"layer {index} has neither an MLP nor experts")
        if layer.sinks is not None:
            _equal(f"layer {index}'s sinks", layer.sinks.shape, (shape.q_heads,))
        for name, norm, width in (
            ("input norm", layer.input_norm, shape.hidden),
            ("post norm", layer.post_norm, shape.hidden),
            ("query norm", layer.q_norm, shape.head_dim),
            ("key norm", layer.k_norm, shape.head_dim),
        ):
            if norm is not None:
                _equal(f"layer {index}'s {name}", norm.weight.shape, (width,))
    _equal("the final norm", final_norm.weight.shape, (shape.hidden,))
    _check_linear("the head", head, (shape.vocab, shape.hidden))


def check_mixture(name: str, weight: MixtureWeight, hidden: int) -> None:
    """Compares every weight of a layer's experts with the others."""
    outputs, inner, routing = weight.router.out_features, weight.inner, weight.routing
    experts = outputs - weight.gated
    coded = weight.coded
    here = experts + weight.shared if coded is None else weight.shared
    if weight.routed != experts or len(weight.gate_up) != here or len(weight.down) != here:
        raise ShapeMismatch(
            f"{name} routes to {experts} experts beside {weight.shared} and has {len(weight.gate_up)} and "
            f"{len(weight.down)}"
        )
    if coded is not None:
        for half in (coded.gate, coded.up):
            _equal(f"{name}'s gates and ups", half.shape, (experts, inner, hidden))
        _equal(f"{name}'s downs", coded.down.shape, (experts, hidden, inner))
    if not 0 < routing.kept <= routing.groups or experts % routing.groups:
        raise ShapeMismatch(f"{name} has {experts} experts in {routing.groups} groups and keeps {routing.kept}")
    if routing.correction is not None:
        _equal(f"{name}'s correction", routing.correction.shape, (experts,))
    _check_linear(f"{name}'s router", weight.router, (outputs, hidden))
    for index, (gate_up, down) in enumerate(zip(weight.gate_up, weight.down, strict=True)):
        _check_linear(f"{name}'s expert {index}, gate and up", gate_up, (2 * inner, hidden))
        _check_linear(f"{name}'s expert {index}, down", down, (hidden, inner))


def _check_linear(name: str, weight: LinearWeight, wanted: tuple[int, int]) -> None:
    columns = {part.shape[1] for part in weight.parts}
    _equal(name, (weight.out_features, *columns), wanted)
    if weight.biases:
        _equal(f"{name}'s bias", (sum(len(bias) for bias in weight.biases),), wanted[:1])
    if weight.quantized:
        rows = sum(codes.codes.shape[0] for codes in weight.quantized)
        _equal(f"{name}'s codes", (rows, *{codes.codes.shape[1] for codes in weight.quantized}), wanted)


def check_plane(plane: Tensor, layers: int, shape: DecoderShape) -> None:
    """``plane``: the cache of a decoder's layers, which compiled code steps through."""
    wanted = (max(layers, plane.shape[0]), 2, plane.shape[2], shape.kv_heads, BLOCK, shape.head_dim)
    _equal("the cache", plane.shape, wanted)
    if plane.dtype != torch.bfloat16 or not plane.is_contiguous():
        raise ShapeMismatch(
            f"the cache is {plane.dtype}, and this pass writes contiguous bfloat16; set kv_cache_dtype: auto"
        )


def check_batch(batch: Any) -> None:
    """The lengths of a batch's arrays against each other; what stands in them the compiled pass checks itself."""
    tokens, requests = batch.input_ids.shape[0], batch.seq_lens.shape[0]
    if (
        batch.positions.shape[0] != tokens
        or batch.slots.shape[0] != tokens
        or batch.query_start.shape[0] != requests + 1
        or batch.block_tables.shape[0] != requests
        or (batch.adapters is not None and batch.adapters.shape[0] != tokens)
    ):
        raise ShapeMismatch(f"the arrays of a batch of {tokens} tokens differ in length; build it with build_batch")


def _equal(name: str, found: Any, wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise ShapeMismatch(
            f"{name} is {list(found)}, and the model's other sizes ask for {list(wanted)}; its config.json does not "
            "describe its weights"
        )
