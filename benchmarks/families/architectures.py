"""Which architectures there are, and how their random checkpoints are made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.models.loading.miniature import Sizes, build, scale_down

TASKS = ("text-generation", "text-embeddings", "reranking")
# What a configuration class leaves open although the model needs it.
COMPLETED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "token_dropout": True,
            "position_embedding_type": "rotary"},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mamba2": {"num_heads": 8, "head_dim": 32, "hidden_size": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "t5gemma": {"is_encoder_decoder": False},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def _longrope(half: int) -> dict[str, Any]:
    """Rotary parameters as those of Phi-3-mini-128k, for so many frequencies."""
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, "factor": 32.0,
        "short_factor": [1.0 + 0.02 * i for i in range(half)], "long_factor": [2.0 + 0.9 * i for i in range(half)],
    }  # fmt: skip


_PHI3_LONG = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
# Layouts that are published and that a class's own defaults do not have.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "falcon": {
        "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 8},
        "alibi": {"alibi": True},
        "one head each": {"multi_query": False, "parallel_attn": False, "bias": True},
    },
    "deepseek_v3": {"equal head sizes": {"qk_nope_head_dim": 64, "v_head_dim": 128, "qk_rope_head_dim": 64}},
    "gpt_bigcode": {"a K/V head per head": {"multi_query": False}},
    "llama": {
        "biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "one K/V head": {"num_key_value_heads": 1},
        "yarn": {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}},
        "llama3": {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}},
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        "longrope": {"rope_parameters": _longrope(64), "max_position_embeddings": 131072},
    },
    "ministral3": {"scaled queries": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}},
    "mistral": {"window": {"sliding_window": 4096}},
    "phi3": {
        "longrope": {"rope_parameters": _longrope(48), **_PHI3_LONG},
        "longrope, partial": {
            "rope_parameters": _longrope(36) | {"partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.75,
            "num_key_value_heads": 8, **_PHI3_LONG},
        "window": {"sliding_window": 2047},
    },
    "phimoe": {"longrope": {
        "rope_parameters": _longrope(64) | {"short_mscale": 1.1, "long_mscale": 1.25},
        "max_position_embeddings": 131072}},
    "qwen2": {"window": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}},
    "stablelm": {"parallel, norms": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}},
}  # fmt: skip


@dataclass(slots=True, frozen=True)
class Architecture:
    """One line of the table: ``name`` is transformers' class."""

    task: str
    model_type: str
    name: str
    variant: str = ""
    overrides: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @property
    def label(self) -> str:
        return self.name + (f" ({self.variant})" if self.variant else "")


def architectures(tasks: tuple[str, ...] = TASKS, only: str = "") -> list[Architecture]:
    """Every architecture of the installed transformers that reads text, in the order of the table; those whose type,
    class or label contains ``only`` where that is given."""
    found = sorted((a for task in tasks for a in _of(task)), key=lambda a: (TASKS.index(a.task), a.name, a.variant))
    wanted = [word.strip().lower() for word in only.split(",") if word.strip()]
    return [
        a
        for a in found
        if not wanted or any(w in (a.model_type, a.name.lower()) or w in a.label.lower() for w in wanted)
    ]


def _of(task: str) -> Iterator[Architecture]:
    from transformers.models.auto import modeling_auto as auto

    if task == "text-generation":
        names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    elif task == "reranking":
        names = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    else:
        # What reads text alone: encoders have a masked or text-encoding head, embedders of today are decoders.
        reads = {**auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, **auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES}
        decoders = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "modernbert-decoder")
        names = {t: auto.MODEL_MAPPING_NAMES[t] for t in (*reads, *decoders) if t in auto.MODEL_MAPPING_NAMES}
        # Of an encoder-decoder the encoder embeds.
        encoding = auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
        names |= {t: name for t, name in encoding.items() if t in names and name.endswith("EncoderModel")}
    seen = set()
    # Several types may share a class; the class has the name of the shortest.
    for model_type, name in sorted(names.items(), key=lambda item: len(item[0])):
        name = name if isinstance(name, str) else name[0]
        if name in seen:
            continue
        seen.add(name)
        yield Architecture(task, model_type, name)
        for variant, overrides in VARIANTS.get(model_type, {}).items():
            if task == "text-generation" or (variant.startswith("longrope") and task == "text-embeddings"):
                yield Architecture(task, model_type, name, variant, overrides)


def sizes(seed: int) -> Sizes:
    """Sizes of a random checkpoint: those of seed 0 suit the compiled layers, others are as odd as published ones."""
    if seed == 0:
        return Sizes()
    rng = random.Random(seed)
    heads = rng.choice([2, 4, 6, 8])
    return Sizes(
        layers=rng.choice([3, 4, 5]), hidden=heads * 16 * rng.choice([1, 2]), heads=heads, kv_heads=rng.choice([1, 2]),
        head_dim=rng.choice([8, 16, 24, 48, 80]), inner=rng.choice([72, 96, 160]), vocab=rng.choice([250, 331, 515]),
        experts=rng.choice([4, 8]), window=rng.choice([1, 7, 20, 33, 64]), chunk=rng.choice([16, 32, 48, 96]),
        original=rng.choice([40, 64, 97]), context=256,
    )  # fmt: skip


def write_checkpoint(architecture: Architecture, folder: Path, seed: int) -> tuple[Any, Any]:
    """A random float32 checkpoint in ``folder``; returns its class and configuration. Raises what transformers raises
    for a class whose default configuration can't be made small."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, architecture.name)
    config = CONFIG_MAPPING[architecture.model_type](
        **COMPLETED.get(architecture.model_type, {}) | architecture.overrides
    )
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    settings: dict[str, Any] = {}
    if architecture.task == "text-generation":
        settings = {"eos_token_id": None} if not hasattr(config, "text_config") else {}
        if architecture.model_type in ("bert", "roberta", "electra") or hasattr(config, "is_decoder"):
            settings["is_decoder"] = True
    elif architecture.task == "reranking":
        settings["num_labels"] = 1
    small = scale_down(config, sizes(seed), **settings)
    if architecture.task == "reranking" and small.get_text_config().pad_token_id is None:
        small.get_text_config().pad_token_id = small.pad_token_id = 0
    module = build(model_class, small, seed)
    module.save_pretrained(folder)
    return model_class, small
