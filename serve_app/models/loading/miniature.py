"""A model's configuration scaled down to what a processor computes in milliseconds, every feature kept.

What a model does at the borders that its configuration names (windows, chunks, original lengths, the context's end)
does not depend on its width. So a copy with random weights, few layers of each kind and borders after a few dozen
tokens shows in milliseconds what the real model would show after minutes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(slots=True, frozen=True)
class Sizes:
    """What a configuration is scaled down to; ``layers`` is the least, more are kept where kinds of layers differ."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 96
    vocab: int = 260
    experts: int = 4
    window: int = 24
    chunk: int = 32
    original: int = 64  # the context that a scaled rotary embedding was trained with
    context: int = 256


MAX_LAYERS = 14
_HIDDEN = {
    "hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim", "attention_hidden_size", "word_embed_proj_dim",
    "embedding_size", "input_embedding_size", "output_embedding_size", "lru_width", "pronunciation_embed_dim",
    "shape_embed_dim", "projection_dim", "d_embed", "pooler_hidden_size",
}  # fmt: skip
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
_OTHER_LAYERS = {"encoder_layers", "num_encoder_layers", "num_layers_per_stack"}
_HEADS = {
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
    "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads",
    "linear_num_value_heads", "linear_num_heads", "num_query_groups",
}  # fmt: skip
_KV_HEADS = {
    "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads", "kv_n_heads",
    "num_global_key_value_heads",
}  # fmt: skip
_HEAD_DIM = {
    "head_dim", "swa_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "dim_head",
    "kv_channels", "d_head", "attention_head_size", "d_kv", "v_head_dim", "qk_nope_head_dim",
    "rotary_dim",
}  # fmt: skip
_INNER = {
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size", "dff", "dim_ff", "d_ff",
    "shared_expert_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "shared_intermediate_size",
    "intermediate_size_mlp", "expert_ffn_hidden_size", "dense_intermediate_size", "feed_forward_size", "d_inner",
    "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "router_hidden_size",
}  # fmt: skip
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_WINDOW = {
    "sliding_window", "window_size", "local_attention", "sliding_window_size", "attention_window_size",
    "keep_window_size", "local_attention_window_len", "attention_window", "local_window_size",
}  # fmt: skip
_CHUNK = {"attention_chunk_size"}
_ORIGINAL = {"original_max_position_embeddings", "floor_scale", "log_scaling_n_floor"}
_CONTEXT = {
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length",
    "max_target_positions", "max_source_positions",
}  # fmt: skip
_INTERVALS = (
    "no_rope_layer_interval", "decoder_sparse_step", "interleave_moe_layer_step", "global_attn_every_n_layers",
    "expert_layer_period", "attn_layer_period", "sliding_window_pattern", "layer_group_size",
)  # fmt: skip
_LEFT_OUT = {
    "transformers_version", "model_type", "_name_or_path", "id2label", "label2id", "_attn_implementation", "dtype",
    "quantization_config", "architectures", "auto_map",
}  # fmt: skip
# What else is large by default, and how small it may be.
_FIXED = {
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "zero_expert_num": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "o_lora_rank": 16, "o_groups": 2, "index_topk": 16, "index_topk_blocks": 2, "index_block_size": 8,
    "index_head_dim": 32, "index_n_heads": 16,  # with fewer, scores of keys are 0 alike, and any of them may be chosen
    "first_k_dense_replace": 1, "num_dense_layers": 1, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "rel_extent": 64, "d_rel": 8, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_ssm": 256,
    "mamba_chunk_size": 16, "chunk_size": 16, "mamba_dt_rank": 8, "mamba_num_heads": 8, "mamba_head_dim": 32,
    "mamba_headdim": 32, "n_mamba_heads": 2, "n_groups": 1, "ssm_state_size": 16, "state_size": 16,
    "time_step_rank": 8, "adapter_rank": 8, "query_pre_attn_scalar": 32, "dim_model_base": 32, "ple_embed_dim": 32,
    "ngram_vocab_size_base": 500, "split_ngram_parts": 4, "hc_lowrank": 16, "gated_norm_rank": 8,
    "pronunciation_vocab_size": 50, "shape_vocab_size": 50, "block_multiple_of": 32, "image_size": 32, "patch_size":
    8, "classifier_proj_size": 16, "attention_head_dim": 64, "num_mem_blocks": 1, "prompt_mid_dim": 16,
    "num_codebooks": 2, "vision_feature_layer": 1, "mm_tokens_per_image": 4, "encoder_hash_byte_group_vocab": 500,
    "ffn_round_up_to_multiple_of": 8, "mlp_expansion_factor": 2,
}  # fmt: skip


class NotScalable(ValueError):
    """The configuration could not be scaled down; the text says what came of it."""


def scale_down(config: Any, sizes: Sizes | None = None, **overrides: Any) -> Any:
    """A configuration of the same class with ``sizes`` and, after them, ``overrides``; raises :class:`NotScalable`."""
    sizes = sizes or Sizes()
    try:
        values = _scaled(config, sizes) | overrides
        return type(config)(**values)
    except Exception as error:  # a configuration class may object in any way it likes
        raise NotScalable(f"{type(config).__name__}: {type(error).__name__}: {error}") from error


def build(model_class: Any, config: Any, seed: int = 0) -> nn.Module:
    """A float32 model with random weights, the same for the same ``seed``; torch's own generator is left as it was."""
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            module = model_class(config)
        finally:
            torch.set_default_dtype(before)
        randomise(module)
    return module.eval().requires_grad_(False)


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Spreads weights so that no part is without effect: attention is peaked, biases and norms are not trivial, and the
    most likely token stands clear of the second."""
    for name, weight in module.named_parameters():
        if not weight.is_floating_point():
            continue
        if weight.ndim >= 2 and ("embed" in name or "wte" in name or "wpe" in name):
            weight.normal_(0, 0.6)
        elif weight.ndim >= 2:
            weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5)
        else:
            weight.add_(torch.randn_like(weight) * 0.15)
    for child in module.modules():
        if type(child).__name__ == "NoNorm":  # MobileBERT's: only its weights keep sums over layers from growing
            child.weight.mul_(0.4)  # type: ignore[operator]


def _scaled(config: Any, sizes: Sizes) -> dict[str, Any]:
    values = {k: v for k, v in config.to_dict().items() if k not in _LEFT_OUT}
    nested = {k: v for k, v in vars(config).items() if k in values and hasattr(v, "to_dict")}
    total = next((values[n] for n in _LAYERS if type(values.get(n)) is int and values[n] > 0), 0)
    kept = _kept_layers(values, total, sizes) if total else []
    original = dict(values)
    for name, value in original.items():
        if name in nested:
            values[name] = type(nested[name])(**_scaled(nested[name], sizes))
        else:
            values[name] = _value(name, value, original, sizes, total, kept)
    if "qk_rope_head_dim" in values and "compress_rates" not in values:
        whole = values["qk_rope_head_dim"] + (values.get("qk_nope_head_dim") or 0)
        part = _rotates_a_part(original)
        if values.get("head_dim"):
            values["head_dim"] = whole if part else values["qk_rope_head_dim"]
        if part:
            values["rope_parameters"]["partial_rotary_factor"] = values["qk_rope_head_dim"] / whole
        if values.get("qk_head_dim"):
            values["qk_head_dim"] = whole
    _fit_recurrences(values, original)
    if config.__class__.__name__.startswith("Gemma4"):  # which makes its own from what it says of global layers
        layers = values.pop("per_layer_config", None) or {}
        heads = [each["num_key_value_heads"] for each in layers.values() if "num_key_value_heads" in each]
        values |= {"global_head_dim": 2 * sizes.head_dim} | ({"num_global_key_value_heads": heads[0]} if heads else {})
    if getattr(config, "num_labels", 2) != 2:
        values["num_labels"] = config.num_labels
    return values


def _fit_recurrences(values: dict[str, Any], original: dict[str, Any]) -> None:
    """Numbers of recurrences that follow from others."""
    hidden = int(values.get("hidden_size") or 0)
    if {"expand", "num_heads", "head_dim"} <= values.keys():  # Mamba 2
        values["num_heads"] = values["expand"] * hidden // values["head_dim"]
    if {"mamba_n_heads", "mamba_d_head"} <= values.keys():  # Granite, Bamba; Falcon H1 names the product
        inner = values.get("mamba_d_ssm") or values["mamba_expand"] * hidden
        values["mamba_n_heads"] = inner // values["mamba_d_head"]
    if {"mamba_headdim", "n_mamba_heads"} <= values.keys():  # Zamba 2
        values["mamba_headdim"] = values["mamba_expand"] * hidden // values["n_mamba_heads"]
    if original.get("attention_hidden_size") == 2 * original.get("hidden_size", 0):
        values["attention_hidden_size"] = 2 * hidden
        values["attention_head_dim"] = 2 * hidden // values["num_attention_heads"]


def _value(name: str, value: Any, values: dict[str, Any], sizes: Sizes, total: int, kept: list[int]) -> Any:
    if name.endswith("_token_id") or name in ("unk_index", "mask_index", "pad_index"):
        return _tokens(value, sizes)
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return _number(name, value, values, sizes, kept)
    if name == "compress_rates":  # of entries that stand for so many tokens (DeepSeek V4)
        return {kind: min(rate, 2 * sizes.chunk) for kind, rate in value.items()}
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, _rotated(values, sizes), sizes)
    if isinstance(value, dict) and value and total and all(str(k).isdigit() for k in value):
        return {
            str(kept.index(int(k))): _layer_values(v, values, sizes, kept) for k, v in value.items() if int(k) in kept
        }
    if isinstance(value, (list, tuple)) and value and total:
        if len(value) == total and not name.endswith(("_idxs", "_ids")):
            return [_number(name, value[i], values, sizes, kept) if type(value[i]) is int else value[i] for i in kept]
        if name.endswith(("_idxs", "_layers", "_layer_ids")) and all(type(v) is int for v in value):
            return [v for v in value if v < len(kept)]
    return value


def _layer_values(value: Any, values: dict[str, Any], sizes: Sizes, kept: list[int]) -> Any:
    """What one layer has for itself."""
    if not isinstance(value, dict):
        return value
    return {k: _number(k, v, values, sizes, kept) if type(v) is int else v for k, v in value.items()}


def _number(name: str, value: int, values: dict[str, Any], sizes: Sizes, kept: list[int]) -> int:
    if name == "global_head_dim":
        return 2 * sizes.head_dim
    if name == "hidden_size_per_layer_input":
        return min(value, 16)
    name = name.removesuffix("_per_layer").removeprefix("global_")
    if name in _FIXED:
        return min(value, _FIXED[name])
    if value <= 0:
        return value
    if name in _LAYERS or name in _OTHER_LAYERS:
        return len(kept) or sizes.layers
    if name == "num_kv_shared_layers":
        return len(kept) // 2
    if name in _KV_HEADS:
        heads = [values[n] for n in _HEADS if type(values.get(n)) is int]
        return 1 if value == 1 else sizes.heads if value in heads else sizes.kv_heads
    if name in ("max_window_layers", "num_nextn_predict_layers"):
        return min(value, len(kept))
    if name in _WINDOW | _CHUNK and value >= _longest(values):
        return sizes.context  # it ends no text's sight, and need not be a window that the model's masks alone know
    for names, small in (
        (_HIDDEN, sizes.hidden), (_HEADS, sizes.heads), (_HEAD_DIM, sizes.head_dim), (_INNER, sizes.inner),
        (_EXPERTS, sizes.experts), (_WINDOW, sizes.window), (_CHUNK, sizes.chunk), (_ORIGINAL, sizes.original),
        (_CONTEXT, sizes.context),
    ):  # fmt: skip
        if name in names:
            return small
    return min(value, sizes.vocab) if "vocab_size" in name else value


def _longest(values: dict[str, Any]) -> float:
    """Positions that a text may have."""
    return max((v for n in _CONTEXT if type(v := values.get(n)) is int), default=float("inf"))


def _rotated(values: dict[str, Any], sizes: Sizes) -> int:
    """Columns of a head that the small copy rotates, before a partial factor of the rotary parameters."""
    if type(values.get("qk_rope_head_dim")) is int:
        return _FIXED["qk_rope_head_dim"]
    return sizes.head_dim if values.get("head_dim") else sizes.hidden // sizes.heads


def _rotates_a_part(values: dict[str, Any]) -> bool:
    """Whether a factor says how much of a head is rotated, of which latent attention has a size as well: Mistral 4."""
    rotated, rest = values.get("qk_rope_head_dim") or 0, values.get("qk_nope_head_dim") or 0
    whole, rope = rotated + rest, values.get("rope_parameters")
    if not whole or values.get("head_dim") != whole or not isinstance(rope, dict):
        return False
    return bool(rope.get("partial_rotary_factor") == rotated / whole)


def _tokens(value: Any, sizes: Sizes) -> Any:
    """Token ids that the small vocabulary has."""
    if isinstance(value, (list, tuple)):
        return [v % sizes.vocab for v in value if isinstance(v, int)]
    return value % sizes.vocab if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


def _rope(values: dict[str, Any], rotated: int, sizes: Sizes) -> dict[str, Any]:
    if values and all(isinstance(v, dict) or v is None for v in values.values()):  # one for each type of layer
        return {kind: _rope(v, rotated, sizes) if v else v for kind, v in values.items()}
    small = dict(values)
    half = int(rotated * (values.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if factors := values.get(name):
            small[name] = [float(factors[i * len(factors) // half]) for i in range(half)]
    if values.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = sizes.original
    if values.get("max_position_embeddings"):
        small["max_position_embeddings"] = sizes.context
    if section := values.get("mrope_section"):
        parts = [max(1, half * part // sum(section)) for part in section]
        parts[0] += half - sum(parts)
        small["mrope_section"] = parts
    return small


def _kept_layers(values: dict[str, Any], total: int, sizes: Sizes) -> list[int]:
    """Indices of the layers that a small copy keeps: the first ones up to one of each kind."""
    lists = [
        v for k, v in values.items()
        if isinstance(v, (list, tuple)) and len(v) == total and not k.endswith(("_idxs", "_ids")) and total > 1
        and list(v) != list(range(total))  # these are layers' numbers
    ]  # fmt: skip
    kinds = [tuple(str(v[i]) for v in lists) for i in range(total)]
    least = min(total, sizes.layers)
    # A mixture whose first layers are dense, a layer in so many without rotation: these come at an interval.
    for name in _INTERVALS:
        interval = values.get(name)
        if isinstance(interval, int) and not isinstance(interval, bool) and interval > 1:
            least = min(total, max(least, interval))
    shared = values.get("num_kv_shared_layers")
    for length in range(least, min(total, MAX_LAYERS) + 1):
        covered = kinds[: length // 2] if shared else kinds[:length]
        if set(covered) >= set(kinds):
            return list(range(length))
    first = sorted({kinds.index(kind) for kind in kinds})[:MAX_LAYERS]
    return sorted({*first, *range(least)})[: max(len(first), least)]
