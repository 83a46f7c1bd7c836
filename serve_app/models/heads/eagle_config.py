"""What an EAGLE-3 head's ``config.json`` says, in the two layouts in which heads are published.

* SafeAILab's, SpecForge's, ModelOpt's: a Llama configuration with ``draft_vocab_size`` beside it, and optionally
  ``eagle_config``; SGLang counts the layer whose *output* is captured there, so 1 is added.
* speculators': ``speculators_model_type: eagle3``, the Llama configuration in ``transformer_layer_config``;
  ``eagle_aux_hidden_state_layer_ids`` is the layer that the captured states *enter*, as everywhere here.

Without layer ids both mean layers 2, n / 2 and n - 3 of n (arXiv 2503.01840's reference code).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.models.loading.folder import UnsupportedModel, read_config

# Of the Llama configuration, what rotary embeddings are made from.
_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


@dataclass(slots=True, frozen=True)
class HeadConfig:
    """Sizes and switches of a head. ``layers``: what enters these layers of the target is what the head reads."""

    hidden: int
    target_hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocab: int
    draft_vocab: int
    layers: tuple[int, ...]
    window: int
    rotary: dict[str, Any]
    tied: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def read_head_config(path: Path, target_layers: int, target_hidden: int) -> HeadConfig:
    """Reads ``path``/config.json. Raises :class:`UnsupportedModel` for what is no EAGLE-3 head or not this target's."""
    raw = read_config(path)
    kind = raw.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise UnsupportedModel(f"{path} is a speculator of type {kind}; only eagle3 heads can be used here")
    model = raw["transformer_layer_config"] if kind else raw
    nested = raw.get("eagle_config") or {}
    switches = {**raw, **nested}
    if model.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel(f"{path} has {model['num_hidden_layers']} layers; EAGLE-3 heads of one layer are known")
    if model.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{path} uses {model['hidden_act']}; EAGLE-3 heads with SiLU are known")
    if nested.get("use_aux_hidden_state") is False or raw.get("parallel_drafting"):
        raise UnsupportedModel(f"{path} does not draft a chain from three layers' hidden states, so it is no EAGLE-3")
    try:
        hidden, heads = model["hidden_size"], model["num_attention_heads"]
        inner, vocab = model["intermediate_size"], model["vocab_size"]
    except KeyError as missing:
        raise UnsupportedModel(f"{path}/config.json has no {missing}; is it an EAGLE-3 head's?") from None
    layers = _layers(raw, nested, target_layers)
    if not all(0 <= layer < target_layers for layer in layers):
        raise UnsupportedModel(
            f"{path} reads layers {list(layers)}, and its target has {target_layers}; give the head of this model"
        )
    wanted = raw.get("target_hidden_size") or hidden
    if wanted != target_hidden:
        raise UnsupportedModel(
            f"{path} was trained for a target of width {wanted}, not {target_hidden}; give the head of this model"
        )
    return HeadConfig(
        hidden=hidden,
        target_hidden=target_hidden,
        inner=inner,
        q_heads=heads,
        kv_heads=model.get("num_key_value_heads") or heads,
        head_dim=model.get("head_dim") or hidden // heads,
        eps=float(model.get("rms_norm_eps", 1e-6)),
        vocab=vocab,
        draft_vocab=raw.get("draft_vocab_size") or vocab,
        layers=layers,
        window=_window(model),
        rotary={k: model[k] for k in _ROTARY if model.get(k) is not None},
        tied=bool(raw.get("tie_word_embeddings", False)),
        # vLLM's default for each layout.
        norm_before_residual=bool(switches.get("norm_before_residual", kind is not None)),
        norm_before_fc=bool(switches.get("norm_before_fc")),
        fc_norm=bool(switches.get("fc_norm")),
        norm_output=bool(switches.get("norm_output")),
    )


def _layers(raw: dict[str, Any], nested: dict[str, Any], count: int) -> tuple[int, ...]:
    if given := raw.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(given)
    if given := nested.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(layer + 1 for layer in given)
    return (2, count // 2, count - 3)


def _window(model: dict[str, Any]) -> int:
    if "sliding_attention" in (model.get("layer_types") or ()) or model.get("use_sliding_window"):
        return int(model.get("sliding_window") or 0)
    return 0
