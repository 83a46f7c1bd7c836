"""The generic standard layer: one forward for every model that is built like Llama, read off its own modules.

transformers' modules are only read: projections are fused and packed, rotary tables come from the model's own
``rotary_emb``, scale and window of each layer from what the model hands to attention. A model whose modules have an
unknown part is refused here, and one whose results differ is refused by the check in ``optimise.py``; both keep
transformers' forward.

On CPUs with bfloat16 dot products the whole pass is one C++ call (``kernels/decoder.py``); elsewhere, and in float32,
it is :class:`FusedForward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.decoder import (
    Decoder,
    DecoderLayer,
    LinearWeight,
    NormWeight,
    decoder_library,
)
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.fused import FusedLinear, QuantizedLinear, tail_rows
from serve_app.kernels.linear.panels import PanelStore, panel_library
from serve_app.kernels.linear.quantize import Quantized
from serve_app.kernels.reference.operators import swiglu
from serve_app.models.adapters import AdapterBank, bank_plug
from serve_app.models.decoders.decoder_parts import DecoderParts, NotStandard
from serve_app.models.linears import Plug, chained, place_of, plugged

if TYPE_CHECKING:
    from serve_app.engine.step import Batch


def build_forward(
    parts: DecoderParts,
    plug: Plug | None = None,
    bank: AdapterBank | None = None,
    outer: Plug | None = None,
) -> tuple[Callable[[Batch], Tensor], str]:
    """The fastest forward for this CPU and the weights' dtype, and its name for the log. Plugged linears are called
    from Python, so that with ``plug`` or ``outer`` (which gets what adapters make of a linear) the pass is torch's;
    adapters of ``bank`` are part of the C++ pass.
    """
    alone = plug is None and outer is None
    library = decoder_library(quantized=parts.quantized) if alone else None
    if parts.mixtures and (bank is not None or not alone):
        raise NotStandard("experts with adapters or on several ranks run on transformers' forward")
    if library is not None and parts.embedding.dtype == torch.bfloat16 and parts.obstacle() is None:
        decoder = Decoder(
            library, parts.shape, parts.embedding, parts.layers, parts.final_norm, parts.head, parts.rotary,
            places=0 if bank is None else bank.places, rotary_rows=parts.rotary_rows,
        )  # fmt: skip
        if bank is not None and decoder.adapters is not None:
            bank.hold([place_of(weight) for weight in _all_linears(parts)], decoder.adapters)
        kind = " quantised" if parts.quantized else ""
        if decoder.packed_bytes < 0.9 * decoder.plain_bytes:
            kind += f", as if they were {decoder.plain_bytes / 1e6:.0f}"
        return decoder, f"C++ decoder, {decoder.packed_bytes / 1e6:.0f} MB packed{kind}"
    return FusedForward(parts, chained(chained(plug, bank_plug(bank)), outer)), "fused torch decoder"


def _all_linears(parts: DecoderParts) -> list[LinearWeight]:
    """In the order of the C++ pass."""
    return [*(weight for layer in parts.layers for weight in layer.linears()), parts.head]


def free_weights(parts: DecoderParts, *, experts: bool) -> None:
    """Drops the modules' own weights once a packed copy serves, those of ``experts`` as well; the modules can't run
    afterwards.
    """
    parts.layers.clear()
    parts.head.parts.clear()
    parts.head.quantized.clear()
    for block in parts.blocks.values() if experts else ():
        for module in block.modules():
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                setattr(module, name, None)
            module.expert_codes = module.quantized = None  # type: ignore[assignment]
    parts.blocks.clear()
    for linear in parts.linears:
        linear.weight = None  # type: ignore[assignment]
        linear.quantized = None  # type: ignore[assignment]


class FusedForward:
    """The same pass in torch: fused projections and epilogues, any dtype, rounding as in the modules."""

    def __init__(self, parts: DecoderParts, plug: Plug | None = None) -> None:
        self.shape, self.embedding, self.final_norm = parts.shape, parts.embedding, parts.final_norm
        self.embed = parts.embed
        self.rotary, self.rotary_rows, self.positions = parts.rotary, parts.rotary_rows, 0
        self.blocks = dict(parts.blocks)
        self.store = _store(parts)
        make = _Making(plug, self.store)
        self.layers = [(layer, _linears(layer, make)) for layer in parts.layers]
        self.head = make(parts.head)

    @property
    def packed_bytes(self) -> int:
        """Of its linears in fewer bits."""
        return 0 if self.store is None else self.store.bytes

    def weights(self) -> list[Tensor]:
        """Those of its other linears, as they lie in memory."""
        linears = [linear for _, own in self.layers for linear in (own.qkv, own.o, *own.halves)]
        return [linear.weight for linear in (*linears, self.head) if isinstance(linear, FusedLinear)]

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [S, vocab] of ``batch.sample_rows``."""
        shape, tokens = self.shape, len(batch.input_ids)
        cos, sin = self._tables(batch)
        tail = tail_rows(tokens)
        x = self.embed(_padded(batch.input_ids, tail))
        if batch.embeddings is not None:
            x = batch.embeddings.put_into(x)
        split = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        wanted = batch.capture.layers if batch.capture is not None else ()
        captured = {}
        for index, (layer, linears) in enumerate(self.layers):
            if index in wanted:
                captured[index] = x[:tokens]
            projected = linears.qkv(rms_norm(x, layer.input_norm), batch)[:tokens]
            q, k, v = projected.view(tokens, -1, shape.head_dim).split(split, 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm), rms_norm(k, layer.k_norm)
            kv = batch.kv.layer(index)
            write_kv(kv, rotate(k, cos, sin), v, batch.slots)
            heads = paged_attention(
                rotate(q, cos, sin),
                kv,
                batch,
                scale=layer.scale,
                window=layer.window or None,
                softcap=layer.softcap or None,
                sinks=layer.sinks,
            )
            x = linears.o.plus(_padded(heads.view(tokens, -1), tail), x, batch)
            normed = rms_norm(x, layer.post_norm)
            if linears.down is None:
                x = x + _block(self.blocks[index], normed)
            else:
                x = linears.down.plus(linears.gated(normed, batch), x, batch)
            if batch.embeddings is not None:
                x = batch.embeddings.add_behind(index, x)
        if batch.capture is not None:
            batch.capture.states = torch.stack([captured[i] for i in wanted], 1)
        return self.head(rms_norm(x[batch.sample_rows], self.final_norm), batch, batch.sample_rows)

    def _tables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.max_seq_len > self.positions:
            self.positions = max(1024, 1 << (batch.max_seq_len - 1).bit_length())
            dtype = self.embedding.dtype
            self.cos, self.sin = (t.to(dtype) for t in self.rotary(self.positions))
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        if batch.axes is not None and self.rotary_rows is not None:
            cos, sin = (t.to(self.embedding.dtype) for t in self.rotary_rows(batch.axes))
        return cos.unsqueeze(1), sin.unsqueeze(1)


def _block(module: Any, x: Tensor) -> Tensor:
    """Rows [T, H] through a mixture's own module; some give the routers' weights as well."""
    found = module(x[None])
    return (found[0] if isinstance(found, tuple) else found)[0]


def _padded(rows: Tensor, tail: int) -> Tensor:
    """With ``tail`` rows of zeros behind. Torch copies where there are none, and a decode step has none."""
    return F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, tail)) if tail else rows


def rms_norm(x: Tensor, norm: NormWeight) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of [T, heads, D]; columns behind the rotated part stay."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _fused(weight: LinearWeight) -> tuple[Tensor, Tensor | None]:
    return torch.cat(weight.parts), torch.cat(weight.biases) if weight.biases else None


@dataclass(slots=True)
class LayerLinears:
    """The linears of one layer; ``gated`` is the MLP up to its down projection, ``silu(gate) * up``. A mixture has
    neither.
    """

    qkv: Linear
    o: Linear
    gated: Callable[[Tensor, Batch], Tensor]
    halves: tuple[Linear, ...]  # what ``gated`` calls, and ``down``
    down: Linear | None


def _store(parts: DecoderParts) -> PanelStore | None:
    """Where linears in fewer bits lie, if this CPU multiplies those."""
    library = panel_library(quantized=True) if parts.quantized and parts.embedding.dtype == torch.bfloat16 else None
    weights = [*(weight for layer in parts.layers for weight in layer.linears()), parts.head]
    return None if library is None else PanelStore(library, sum(w.packed_bytes for w in weights if w.quantized))


@dataclass(slots=True)
class _Making:
    """Makes linears of weights, with what ``plug`` makes of them."""

    plug: Plug | None
    store: PanelStore | None

    def __call__(self, weight: LinearWeight) -> Linear:
        if self.store is not None and weight.quantized:
            bias = torch.cat(weight.biases) if weight.biases else None
            return plugged(self.plug, weight, QuantizedLinear(self.store, Quantized.stack(weight.quantized), bias))
        return plugged(self.plug, weight, FusedLinear(*_fused(weight)))


def _linears(layer: DecoderLayer, make: _Making) -> LayerLinears:
    if layer.gate_up is None or layer.down is None:
        return LayerLinears(make(layer.qkv), make(layer.o), lambda x, batch: x, (), None)
    if len(layer.gate_up.names) == 1 and make.plug is not None:  # what is plugged into one module computes all of it
        joined = make(layer.gate_up)
        halves: tuple[Linear, ...] = (joined,)

        def gated(x: Tensor, batch: Batch) -> Tensor:
            return swiglu(joined(x, batch))
    else:
        gate, up = halves = tuple(make(half) for half in _split(layer.gate_up))

        def gated(x: Tensor, batch: Batch) -> Tensor:
            return up.times(x, gate.swish(x, batch), batch)

    down = make(layer.down)
    return LayerLinears(make(layer.qkv), make(layer.o), gated, (*halves, down), down)


def _split(weight: LinearWeight) -> list[LinearWeight]:
    """Gates and ups, which have as many outputs."""
    joined, bias = _fused(weight)
    biases = [[half] for half in bias.chunk(2)] if bias is not None else [[], []]
    names = [(name,) for name in weight.names] if len(weight.names) == 2 else [(), ()]
    codes: list[list[Quantized]] = [[], []]
    if weight.quantized:
        both, half = Quantized.stack(weight.quantized), weight.out_features // 2
        codes = [[both.part(slice(half))], [both.part(slice(half, None))]]
    return [LinearWeight(*each) for each in zip(([w] for w in joined.chunk(2)), biases, codes, names, strict=True)]
