"""Reads a decoder that is built like Llama, or like it with experts, off transformers' modules.

Projections are read to be fused and packed, rotary tables come from the model's own ``rotary_emb``, scale, window and
sinks of each layer from what the model hands to attention. A model whose modules have an unknown part is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.kernels.decoder import DecoderLayer, DecoderShape, LinearWeight, NormWeight
from serve_app.models import attention
from serve_app.models.divided.modules import SummedLinear, VocabularyEmbedding
from serve_app.models.mixtures.routed import NotRouted, is_mixture, read_mixture
from serve_app.models.quantization import codes_of

if TYPE_CHECKING:
    from serve_app.models.load import CausalModel

# Tables of these depend on the position alone; others (dynamic, longrope) on the length of the text.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_TOP = {"model", "lm_head"}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "resid_attn_dropout", "resid_mlp_dropout"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "sinks"}
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class NotStandard(ValueError):
    """The model is not built like Llama; the text names the first part that differs."""


@dataclass(slots=True)
class DecoderParts:
    """What a standard decoder consists of. ``linears`` are the modules beside mixtures whose weights a packed copy
    replaces.
    """

    shape: DecoderShape
    embedding: Tensor
    layers: list[DecoderLayer]
    final_norm: NormWeight
    head: LinearWeight
    rotary: Callable[[int], tuple[Tensor, Tensor]]
    linears: list[nn.Linear]
    # Of rows whose positions are three numbers [3, T] (`Batch.axes`): cos and sin [T, rotary_dim / 2] float32.
    rotary_rows: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    # Looks tokens up where several ranks have the embedding between them.
    look_up: nn.Module | None = None
    # Modules of mixtures, by layer: torch's pass calls them as they are.
    blocks: dict[int, nn.Module] = field(default_factory=dict)

    @property
    def embed(self) -> Callable[[Tensor], Tensor]:
        """Ids [T] to rows [T, hidden]."""
        table = self.embedding
        return self.look_up or (lambda ids: F.embedding(ids, table))

    @property
    def quantized(self) -> bool:
        dense = any(w.quantized for layer in self.layers for w in layer.linears())
        mixtures = (layer.mixture for layer in self.layers if layer.mixture is not None)
        return dense or any(w.quantized for mixture in mixtures for w in mixture.linears())

    @property
    def mixtures(self) -> bool:
        return any(layer.mixture is not None for layer in self.layers)

    def obstacle(self) -> str | None:
        """Why the C++ pass can't run it, or None."""
        own = (layer.mixture.obstacle() for layer in self.layers if layer.mixture is not None)
        return self.shape.obstacle() or next((reason for reason in own if reason), None)


def read_model(model: CausalModel, probe: Callable[[], Any]) -> DecoderParts:
    """Reads a loaded model's modules; ``probe()`` runs its own forward once. Raises :class:`NotStandard`."""
    top: Any = model.module
    _only(top, _TOP)
    base: Any = top.model
    if hasattr(base, "language_model"):
        base = base.language_model  # what looks at pictures stands beside it, and never sees a batch
    _only(base, _BASE)
    table = base.embed_tokens
    shared = isinstance(table, VocabularyEmbedding)
    if type(table.table if shared else table) is not nn.Embedding:
        raise NotStandard(f"embed_tokens is a {type(table).__name__}")
    calls = _attention_calls(probe)
    names = {module: name for name, module in top.named_modules()}
    layers = [_read_layer(layer, calls.get(i), names) for i, layer in enumerate(base.layers)]
    blocks = {i: layer.mlp for i, layer in enumerate(base.layers) if is_mixture(layer.mlp)}
    of_blocks = {module for block in blocks.values() for module in block.modules()}
    head = _linear(names, top.lm_head)
    first, shape = layers[0], model.kv_shape.same
    dense = next((layer.gate_up for layer in layers if layer.gate_up is not None), None)
    if shape is None:
        raise NotStandard("layers differ in K/V heads or head size")
    rotary = rotary_tables(base.rotary_emb, base.embed_tokens.weight, shape.head_dim)
    rotary_dim = 2 * rotary(2)[0].shape[1]  # the first position's table is ones
    if rotary_dim > shape.head_dim:
        raise NotStandard("the rotary table is wider than a head")
    sizes = DecoderShape(
        vocab=head.out_features,
        hidden=base.embed_tokens.weight.shape[1],
        inner=0 if dense is None else dense.out_features // 2,
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
        linears=[
            m for p in (base, top.lm_head) for m in p.modules() if isinstance(m, nn.Linear) and m not in of_blocks
        ],
        rotary_rows=rotary_rows(base.rotary_emb, base.embed_tokens.weight),
        look_up=table if shared else None,
        blocks=blocks,
    )


def _one_size(sizes: DecoderShape, layers: list[DecoderLayer], head: LinearWeight) -> None:
    """Compiled code steps through all layers with the same sizes: each weight must have them."""
    hidden, inner, heads = sizes.hidden, sizes.inner, sizes.q_heads * sizes.head_dim
    outputs = heads + 2 * sizes.kv_heads * sizes.head_dim
    for index, layer in enumerate(layers):
        wanted = [(layer.qkv, outputs, hidden), (layer.o, hidden, heads), (head, sizes.vocab, hidden)]
        if layer.gate_up is not None and layer.down is not None:
            wanted += [(layer.gate_up, 2 * inner, hidden), (layer.down, hidden, inner)]
        for weight, rows, columns in wanted:
            if weight.out_features != rows or any(part.shape[1] != columns for part in weight.parts):
                raise NotStandard(f"layer {index} has projections of other sizes")


def _only(module: nn.Module, known: set[str]) -> None:
    unknown = {name for name, _ in module.named_children()} - known
    own = {name for name, _ in module.named_parameters(recurse=False)} - known
    if unknown or own:
        raise NotStandard(f"{type(module).__name__} has {', '.join(sorted(unknown | own))}")


def _read_layer(layer: Any, call: dict[str, Any] | None, known: dict[Any, str]) -> DecoderLayer:
    _only(layer, _LAYER)
    attn, mlp = layer.self_attn, layer.mlp
    _only(attn, _ATTENTION)
    if call is None:
        raise NotStandard("attention was not called")
    gate_up = down = mixture = None
    if is_mixture(mlp):
        try:
            mixture = read_mixture(mlp)
        except NotRouted as reason:
            raise NotStandard(str(reason)) from reason
    else:
        gate_up, down = _read_mlp(mlp, known)
    names = ("qkv_proj",) if hasattr(attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    sinks = call.get("s_aux")
    return DecoderLayer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_linear(known, *(_child(attn, name) for name in names)),
        q_norm=_norm(attn.q_norm) if hasattr(attn, "q_norm") else None,
        k_norm=_norm(attn.k_norm) if hasattr(attn, "k_norm") else None,
        o=_linear(known, _child(attn, "o_proj")),
        post_norm=_norm(_child(layer, "post_attention_layernorm")),
        gate_up=gate_up,
        down=down,
        window=int(call.get("sliding_window") or 0),
        scale=float(call.get("scaling") or attn.head_dim**-0.5),
        softcap=float(call.get("softcap") or 0.0),
        mixture=mixture,
        sinks=None if sinks is None else sinks.detach(),
    )


def _read_mlp(mlp: Any, known: dict[Any, str]) -> tuple[LinearWeight, LinearWeight]:
    """Gate and up, and down."""
    _only(mlp, _MLP)
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    x = torch.linspace(-4, 4, 64)
    if activation is None or not torch.allclose(activation(x), F.silu(x), atol=1e-6):
        raise NotStandard("the MLP's activation is not SiLU")
    halves = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    return _linear(known, *(_child(mlp, name) for name in halves)), _linear(known, _child(mlp, "down_proj"))


def _child(module: nn.Module, name: str) -> Any:
    if not hasattr(module, name):
        raise NotStandard(f"{type(module).__name__} has no {name}")
    found = getattr(module, name)
    # Whose parts ranks add up; whoever loads the model plugs that into the pass.
    return found.linear if isinstance(found, SummedLinear) else found


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


def rotary_tables(module: Any, like: Tensor, head_dim: int = 0) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The first halves of the model's own cos and sin tables, in the precision the model uses, as float32. A table of
    half a head's columns (``head_dim``) may have each frequency once.
    """
    if getattr(module, "rope_type", None) not in _ROPE_TYPES:
        raise NotStandard(f"rotary embedding of type {getattr(module, 'rope_type', None)}")

    @torch.inference_mode()
    def tables(positions: int) -> tuple[Tensor, Tensor]:
        where = torch.arange(positions, device=like.device)
        cos, sin = (t[0].float() for t in module(like[:1].unsqueeze(0), where.unsqueeze(0)))
        half = cos.shape[1] // 2
        if cos.shape[1] == head_dim // 2 and not torch.equal(cos[:, :half], cos[:, half:]):
            return cos.contiguous(), sin.contiguous()  # gpt-oss's has each frequency once
        if not torch.equal(cos[:, :half], cos[:, half:]):
            raise NotStandard("the rotary table is interleaved")
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    return tables


def rotary_rows(module: Any, like: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The same of rows at positions of three numbers each, for a model that has them."""

    @torch.inference_mode()
    def tables(axes: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (t[0].float() for t in module(like[:1].unsqueeze(0), axes.unsqueeze(1)))
        half = cos.shape[1] // 2
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
