"""The generic standard layer for GPUs: few launches, one copy of the weights, logits of sampled rows only.

A layer is four matrix products and four or five small kernels. The residual sum is taken in with the norm that follows
it, rotation with the write to the cache. Lengths are never read on the host, so that the pass can be captured in a CUDA
graph. It runs on CPU tensors as well, where tests compare it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from serve_app.kernels.decoder import DecoderLayer, LinearWeight, NormWeight
from serve_app.kernels.linear.base import Linear, PlainLinear
from serve_app.kernels.linear.fp8 import Fp8Linear
from serve_app.kernels.operators import Operators
from serve_app.kernels.reference.operators import TORCH
from serve_app.kernels.shapes import check_decoder
from serve_app.models.decoders.device_mixture import DeviceMixture
from serve_app.models.linears import Plug, plugged

if TYPE_CHECKING:
    from serve_app.engine.step import Batch
    from serve_app.models.decoders.decoder_parts import DecoderParts

# (weight [n, k], bias [n] or None) -> what computes with them
MakeLinear = Callable[[Tensor, Tensor | None], Linear]


@dataclass(slots=True)
class DeviceLayer:
    input_norm: NormWeight
    qkv: Linear
    q_norm: tuple[Tensor, float] | None
    k_norm: tuple[Tensor, float] | None
    o: Linear
    post_norm: NormWeight
    # A layer has both of these, or a mixture.
    gate_up: Linear | None
    down: Linear | None
    mixture: DeviceMixture | None
    options: dict[str, Any]  # of attention


class DeviceForward:
    """The forward pass over a flat batch: logits [S, vocab] of ``batch.sample_rows``."""

    def __init__(
        self,
        parts: DecoderParts,
        operators: Operators,
        max_positions: int,
        linear: MakeLinear = PlainLinear,
        plug: Plug | None = None,
        head: MakeLinear = PlainLinear,
    ) -> None:
        check_decoder(parts.shape, parts.embedding, parts.layers, parts.final_norm, parts.head)
        self.operators, self.shape = operators, parts.shape
        self.embedding, self.final_norm = parts.embedding, parts.final_norm
        self.embed = parts.embed
        owners = {module.weight.data_ptr(): module for module in parts.linears}

        def make(weight: LinearWeight, linear: MakeLinear = linear) -> Linear:
            return plugged(plug, weight, linear(*fuse(weight, owners)))

        self.layers = [_layer(layer, operators, make) for layer in parts.layers]
        # The head is not rounded to fewer bits: that decides between tokens directly.
        self.head = make(parts.head, head)
        # To the end from the start: a table that grows would move under a captured graph.
        self.cos, self.sin = parts.rotary(max_positions)
        self.rotary_rows = parts.rotary_rows

    def __call__(self, batch: Batch) -> Tensor:
        operators, rows = self.operators, batch.sample_rows
        batch.tiles = batch.sampled_tiles = None  # a graph has to work them out as well
        cos, sin, positions = self.cos, self.sin, batch.positions
        if batch.axes is not None and self.rotary_rows is not None:
            # A table of the batch's own, in which each row has its place.
            cos, sin = self.rotary_rows(batch.axes)
            positions = torch.arange(len(positions), device=positions.device)
        wanted = batch.capture.layers if batch.capture is not None else ()
        captured: dict[int, Tensor] = {}
        x, delta = self.embed(batch.input_ids), None
        if batch.embeddings is not None:
            x = batch.embeddings.put_into(x)
        for index, layer in enumerate(self.layers):
            kv = batch.kv.layer(index)
            normed, x = operators.add_rms_norm(x, delta, layer.input_norm.weight, layer.input_norm.eps)
            delta = None
            if index in wanted:
                captured[index] = x
            q = operators.rotate_and_write(
                layer.qkv(normed, batch), kv, cos, sin, positions, batch.slots, layer.q_norm, layer.k_norm
            )
            heads = operators.attention(q, kv, batch, **layer.options).flatten(1)
            # What is not needed any more is let go at once: a step's largest buffers are those between gate and down.
            del q, normed
            held = None
            if index == len(self.layers) - 1 and len(rows) < len(x):
                heads, x, held = heads[rows], x[rows], rows  # behind the last attention, other rows serve nothing
                if len(rows) == 0:
                    break
            added = layer.o(heads, batch, held)
            del heads
            normed, x = operators.add_rms_norm(x, added, layer.post_norm.weight, layer.post_norm.eps)
            del added
            if layer.mixture is not None:
                delta = layer.mixture(normed, batch, held)
                del normed
            else:
                assert layer.gate_up is not None and layer.down is not None
                inner = layer.gate_up(normed, batch, held)
                del normed
                inner = operators.swiglu(inner)
                delta = layer.down(inner, batch, held)
                del inner
            if batch.embeddings is not None and held is None and batch.embeddings.feeds(index, x.shape[1]):
                x, delta = batch.embeddings.add_behind(index, x + delta), None
        if batch.capture is not None:
            batch.capture.states = torch.stack([captured[i] for i in wanted], 1)
        if len(rows) == 0:
            return x.new_empty((0, self.shape.vocab))
        normed, _ = operators.add_rms_norm(x, delta, self.final_norm.weight, self.final_norm.eps)
        return self.head(normed, batch, rows)


def obstacle(parts: DecoderParts, *, fp8: bool, plug: Plug | None) -> str | None:
    """Why transformers' own forward is the better one for a model with experts, or None."""
    from serve_app.kernels.gpu.backend import operators

    if not parts.mixtures:
        return None
    if fp8:
        return "the experts do not compute in float8"
    if plug is not None:
        return "experts with adapters or on several ranks run on transformers' forward"
    if parts.quantized:
        return "experts in fewer bits are not kept as codes by the fused layers for GPUs"
    if operators(parts.embedding.device).mix_experts is TORCH.mix_experts:
        return "the kernels for experts are not used on this device"
    return None


def build_forward(
    parts: DecoderParts, max_positions: int, cache: torch.dtype, *, fp8: bool = False, plug: Plug | None = None
) -> tuple[Callable[[Batch], Tensor], str]:  # fmt: skip
    """The pass with the operators that the weights' device gets, and its name for the log; ``cache`` is the dtype of
    keys and values. With ``fp8`` the layers' linears compute in float8; raises ValueError where they can't.
    """
    from serve_app.kernels.gpu.backend import describe, operators
    from serve_app.kernels.gpu.choice import Heads, choose_attention

    device, shape, dtype = parts.embedding.device, parts.shape, parts.embedding.dtype
    found = operators(device)
    heads = Heads(shape.q_heads, shape.kv_heads, shape.head_dim, dtype, cache)
    attention, why = choose_attention(found, heads, device)
    found = dataclasses.replace(found, attention=attention)
    plain, finish = linears_for(device, found)
    make: MakeLinear = (lambda w, b: Fp8Linear(w, b, found.quantize_rows)) if fp8 else plain
    forward = DeviceForward(parts, found, max_positions, make, plug, plain)
    told = (f"fused layers{' in float8' if fp8 else ''}", " ".join(describe(device)), why, finish())
    return forward, ", ".join(part for part in told if part)


def linears_for(device: torch.device, operators: Operators) -> tuple[MakeLinear, Callable[[], str]]:
    """What makes linears of whole weights, and what tunes those that it has made and says how."""
    if operators.name == "torch":
        return PlainLinear, lambda: ""
    from serve_app.kernels.gpu import few_rows

    if not few_rows.usable(device):
        return PlainLinear, lambda: ""
    made: list[few_rows.FewRowsLinear] = []

    def make(weight: Tensor, bias: Tensor | None) -> Linear:
        made.append(few_rows.FewRowsLinear(weight, bias))
        return made[-1]

    return make, lambda: str(few_rows.choose(made))


def _layer(layer: DecoderLayer, operators: Operators, make: Callable[[LinearWeight], Linear]) -> DeviceLayer:
    def norm(found: NormWeight | None) -> tuple[Tensor, float] | None:
        return None if found is None else (found.weight, found.eps)

    return DeviceLayer(
        input_norm=layer.input_norm,
        qkv=make(layer.qkv),
        q_norm=norm(layer.q_norm),
        k_norm=norm(layer.k_norm),
        o=make(layer.o),
        post_norm=layer.post_norm,
        gate_up=None if layer.gate_up is None else make(layer.gate_up),
        down=None if layer.down is None else make(layer.down),
        mixture=None if layer.mixture is None else DeviceMixture(layer.mixture, operators, make),
        options={
            "scale": layer.scale,
            "window": layer.window or None,
            "softcap": layer.softcap or None,
            "sinks": layer.sinks,
        },
    )


def fuse(weight: LinearWeight, owners: dict[int, nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One tensor [sum of n_i, k] for the parts, and one bias. The modules that owned the parts (by data pointer) get
    views of it, so that they go on working and no weight is held twice.
    """
    bias = torch.cat(weight.biases) if weight.biases else None
    if len(weight.parts) == 1:
        return weight.parts[0], bias
    joined = torch.cat(weight.parts)
    views = list(joined.split([len(part) for part in weight.parts]))
    for part, view in zip(weight.parts, views, strict=True):
        if (owner := owners.get(part.data_ptr())) is not None and owner.weight.shape == view.shape:
            owner.weight = nn.Parameter(view, requires_grad=False)
    weight.parts[:] = views
    return joined, bias
