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
from torch import Tensor, nn

from serve_app.kernels.attention import paged_attention, write_kv
from serve_app.kernels.decoder import (
    Decoder,
    DecoderLayer,
    DecoderShape,
    LinearWeight,
    NormWeight,
    decoder_library,
)
from serve_app.kernels.linear.base import Linear
from serve_app.kernels.linear.fused import FusedLinear, tail_rows
from serve_app.kernels.reference.operators import swiglu
from serve_app.models import attention
from serve_app.models.adapters import AdapterBank, bank_plug
from serve_app.models.linears import Plug, chained, place_of, plugged
from serve_app.models.quantization import codes_of

if TYPE_CHECKING:
    from serve_app.engine.step import Batch
    from serve_app.models.load import CausalModel

# Tables of these depend on the position alone; others (dynamic, longrope) on the length of the text.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_TOP = {"model", "lm_head"}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "resid_attn_dropout", "resid_mlp_dropout"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class NotStandard(ValueError):
    """The model is not built like Llama; the text names the first part that differs."""


@dataclass(slots=True)
class DecoderParts:
    """What a standard decoder consists of. ``linears`` are the modules whose weights a packed copy replaces."""

    shape: DecoderShape
    embedding: Tensor
    layers: list[DecoderLayer]
    final_norm: NormWeight
    head: LinearWeight
    rotary: Callable[[int], tuple[Tensor, Tensor]]
    linears: list[nn.Linear]

    @property
    def quantized(self) -> bool:
        return any(w.quantized for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))


def read_model(model: CausalModel, probe: Callable[[], Any]) -> DecoderParts:
    """Reads a loaded model's modules; ``probe()`` runs its own forward once. Raises :class:`NotStandard`."""
    top = model.module
    _only(top, _TOP)
    base: Any = top.model
    _only(base, _BASE)
    if type(base.embed_tokens) is not nn.Embedding:
        raise NotStandard(f"embed_tokens is a {type(base.embed_tokens).__name__}")
    calls = _attention_calls(probe)
    names = {module: name for name, module in top.named_modules()}
    layers = [_read_layer(layer, calls.get(i), names) for i, layer in enumerate(base.layers)]
    head = _linear(names, top.lm_head)
    rotary = rotary_tables(base.rotary_emb, base.embed_tokens.weight)
    first, shape = layers[0], model.kv_shape.same
    if shape is None:
        raise NotStandard("layers differ in K/V heads or head size")
    rotary_dim = 2 * rotary(1)[0].shape[1]
    if rotary_dim > shape.head_dim:
        raise NotStandard("the rotary table is wider than a head")
    sizes = DecoderShape(
        vocab=head.out_features,
        hidden=base.embed_tokens.weight.shape[1],
        inner=first.gate_up.out_features // 2,
        q_heads=first.o.parts[0].shape[1] // shape.head_dim,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=rotary_dim,
    )
    _one_size(sizes, layers, head)
    return DecoderParts(
        shape=sizes,
        embedding=base.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=_norm(base.norm),
        head=head,
        rotary=rotary,
        linears=[m for m in top.modules() if isinstance(m, nn.Linear)],
    )


def build_forward(
    parts: DecoderParts, plug: Plug | None = None, bank: AdapterBank | None = None
) -> tuple[Callable[[Batch], Tensor], str]:
    """The fastest forward for this CPU and the weights' dtype, and its name for the log. Plugged linears are called
    from Python, so that with ``plug`` the pass is torch's; adapters of ``bank`` are part of the C++ pass.
    """
    library = decoder_library(quantized=parts.quantized) if plug is None else None
    if library is not None and parts.embedding.dtype == torch.bfloat16 and parts.shape.obstacle() is None:
        decoder = Decoder(
            library, parts.shape, parts.embedding, parts.layers, parts.final_norm, parts.head, parts.rotary,
            places=0 if bank is None else bank.places,
        )  # fmt: skip
        if bank is not None and decoder.adapters is not None:
            bank.hold([place_of(weight) for weight in _all_linears(parts)], decoder.adapters)
        kind = " quantised" if parts.quantized else ""
        if decoder.packed_bytes < 0.9 * decoder.plain_bytes:
            kind += f", as if they were {decoder.plain_bytes / 1e6:.0f}"
        return decoder, f"C++ decoder, {decoder.packed_bytes / 1e6:.0f} MB packed{kind}"
    return FusedForward(parts, chained(plug, bank_plug(bank))), "fused torch decoder"


def _all_linears(parts: DecoderParts) -> list[LinearWeight]:
    """In the order of the C++ pass."""
    layers = (weight for layer in parts.layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return [*layers, parts.head]


def free_weights(parts: DecoderParts) -> None:
    """Drops the modules' own weights once a packed copy serves; the modules can't run afterwards."""
    parts.layers.clear()
    parts.head.parts.clear()
    parts.head.quantized.clear()
    for linear in parts.linears:
        linear.weight = None  # type: ignore[assignment]
        linear.quantized = None  # type: ignore[assignment]


class FusedForward:
    """The same pass in torch: fused projections and epilogues, any dtype, rounding as in the modules."""

    def __init__(self, parts: DecoderParts, plug: Plug | None = None) -> None:
        self.shape, self.embedding, self.final_norm = parts.shape, parts.embedding, parts.final_norm
        self.rotary, self.positions = parts.rotary, 0
        self.layers = [(layer, _linears(layer, plug)) for layer in parts.layers]
        self.head = _plugged(plug, parts.head)

    def weights(self) -> list[Tensor]:
        """Those of its linears, as they lie in memory."""
        linears = [linear for _, own in self.layers for linear in (own.qkv, own.o, *own.halves, own.down)]
        return [linear.weight for linear in (*linears, self.head) if isinstance(linear, FusedLinear)]

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [S, vocab] of ``batch.sample_rows``."""
        shape, tokens = self.shape, len(batch.input_ids)
        cos, sin = self._tables(batch)
        tail = tail_rows(tokens)
        x = F.embedding(_padded(batch.input_ids, tail), self.embedding)
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
            )
            x = linears.o.plus(_padded(heads.view(tokens, -1), tail), x, batch)
            x = linears.down.plus(linears.gated(rms_norm(x, layer.post_norm), batch), x, batch)
        if batch.capture is not None:
            batch.capture.states = torch.stack([captured[i] for i in wanted], 1)
        return self.head(rms_norm(x[batch.sample_rows], self.final_norm), batch, batch.sample_rows)

    def _tables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.max_seq_len > self.positions:
            self.positions = max(1024, 1 << (batch.max_seq_len - 1).bit_length())
            dtype = self.embedding.dtype
            self.cos, self.sin = (t.to(dtype) for t in self.rotary(self.positions))
        return self.cos[batch.positions].unsqueeze(1), self.sin[batch.positions].unsqueeze(1)


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
    """The linears of one layer; ``gated`` is the MLP up to its down projection, ``silu(gate) * up``."""

    qkv: Linear
    o: Linear
    gated: Callable[[Tensor, Batch], Tensor]
    halves: tuple[Linear, ...]  # what ``gated`` calls
    down: Linear


def _linears(layer: DecoderLayer, plug: Plug | None) -> LayerLinears:
    if len(layer.gate_up.names) == 1 and plug is not None:  # what is plugged into one module computes all of it
        joined = _plugged(plug, layer.gate_up)
        halves: tuple[Linear, ...] = (joined,)

        def gated(x: Tensor, batch: Batch) -> Tensor:
            return swiglu(joined(x, batch))
    else:
        gate, up = halves = tuple(plugged(plug, half, FusedLinear(*_fused(half))) for half in _split(layer.gate_up))

        def gated(x: Tensor, batch: Batch) -> Tensor:
            return up.times(x, gate.swish(x, batch), batch)

    return LayerLinears(_plugged(plug, layer.qkv), _plugged(plug, layer.o), gated, halves, _plugged(plug, layer.down))


def _plugged(plug: Plug | None, weight: LinearWeight) -> Linear:
    return plugged(plug, weight, FusedLinear(*_fused(weight)))


def _split(weight: LinearWeight) -> list[LinearWeight]:
    """Gates and ups, which have as many outputs."""
    joined, bias = _fused(weight)
    biases = [[half] for half in bias.chunk(2)] if bias is not None else [[], []]
    names = [(name,) for name in weight.names] if len(weight.names) == 2 else [(), ()]
    return [LinearWeight([w], b, [], n) for w, b, n in zip(joined.chunk(2), biases, names, strict=True)]


def _one_size(sizes: DecoderShape, layers: list[DecoderLayer], head: LinearWeight) -> None:
    """Compiled code steps through all layers with the same sizes: each weight must have them."""
    hidden, inner, heads = sizes.hidden, sizes.inner, sizes.q_heads * sizes.head_dim
    outputs = heads + 2 * sizes.kv_heads * sizes.head_dim
    for index, layer in enumerate(layers):
        wanted = [(layer.qkv, outputs, hidden), (layer.o, hidden, heads), (layer.gate_up, 2 * inner, hidden)]
        for weight, rows, columns in [*wanted, (layer.down, hidden, inner), (head, sizes.vocab, hidden)]:
            if weight.out_features != rows or any(part.shape[1] != columns for part in weight.parts):
                raise NotStandard(f"layer {index} has projections of other sizes")


def _only(module: nn.Module, known: set[str]) -> None:
    unknown = {name for name, _ in module.named_children()} - known
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if unknown or own:
        raise NotStandard(f"{type(module).__name__} has {', '.join(sorted(unknown | own))}")


def _read_layer(layer: Any, call: dict[str, Any] | None, known: dict[Any, str]) -> DecoderLayer:
    _only(layer, _LAYER)
    attn, mlp = layer.self_attn, layer.mlp
    _only(attn, _ATTENTION)
    _only(mlp, _MLP)
    if call is None or call.get("s_aux") is not None:
        raise NotStandard("attention has sinks or was not called")
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    x = torch.linspace(-4, 4, 64)
    if activation is None or not torch.allclose(activation(x), F.silu(x), atol=1e-6):
        raise NotStandard("the MLP's activation is not SiLU")
    names = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    halves = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    return DecoderLayer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_linear(known, *(_child(attn, name) for name in names)),
        q_norm=_norm(attn.q_norm) if hasattr(attn, "q_norm") else None,
        k_norm=_norm(attn.k_norm) if hasattr(attn, "k_norm") else None,
        o=_linear(known, _child(attn, "o_proj")),
        post_norm=_norm(_child(layer, "post_attention_layernorm")),
        gate_up=_linear(known, *(_child(mlp, name) for name in halves)),
        down=_linear(known, _child(mlp, "down_proj")),
        window=int(call.get("sliding_window") or 0),
        scale=float(call.get("scaling") or attn.head_dim**-0.5),
        softcap=float(call.get("softcap") or 0.0),
    )


def _child(module: nn.Module, name: str) -> Any:
    if not hasattr(module, name):
        raise NotStandard(f"{type(module).__name__} has no {name}")
    return getattr(module, name)


def _linear(names: dict[Any, str], *modules: Any) -> LinearWeight:
    for module in modules:
        if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
            raise NotStandard(f"a projection is a {type(module).__name__} or has hooks")
    biases = [m.bias.detach() for m in modules if m.bias is not None]
    if biases and len(biases) != len(modules):
        raise NotStandard("only some of the fused projections have a bias")
    codes = [found for m in modules for found in codes_of(m)]
    same = len(codes) == len(modules) and len({c.bits for c in codes}) == 1
    return LinearWeight(
        [m.weight.detach() for m in modules], biases, codes if same else [], tuple(names[m] for m in modules)
    )


def _norm(module: Any) -> NormWeight:
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        raise NotStandard(f"{type(module).__name__} is not an RMS norm")
    x = torch.linspace(-2, 3, len(weight), device=weight.device).to(weight.dtype)
    if not torch.allclose(module(x), F.rms_norm(x, (len(weight),), weight, eps), rtol=0.02, atol=1e-3):
        raise NotStandard(f"{type(module).__name__} computes something else than an RMS norm")
    return NormWeight(weight.detach(), eps)


def rotary_tables(module: Any, like: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The first halves of the model's own cos and sin tables, in the precision the model uses, as float32."""
    if getattr(module, "rope_type", None) not in _ROPE_TYPES:
        raise NotStandard(f"rotary embedding of type {getattr(module, 'rope_type', None)}")

    @torch.inference_mode()
    def tables(positions: int) -> tuple[Tensor, Tensor]:
        where = torch.arange(positions, device=like.device)
        cos, sin = (t[0].float() for t in module(like[:1].unsqueeze(0), where.unsqueeze(0)))
        half = cos.shape[1] // 2
        if not torch.equal(cos[:, :half], cos[:, half:]):
            raise NotStandard("the rotary table is interleaved")
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    return tables


def _attention_calls(probe: Callable[[], Any]) -> dict[int, dict[str, Any]]:
    """What the model hands to attention in each layer beside the tensors."""
    from transformers import AttentionInterface

    calls: dict[int, dict[str, Any]] = {}
    original = attention.paged_attention_forward

    def recording(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls[module.layer_idx] = kwargs
        return original(module, *args, **kwargs)

    AttentionInterface.register(attention.NAME, recording)
    try:
        probe()
    finally:
        AttentionInterface.register(attention.NAME, original)
    return calls
