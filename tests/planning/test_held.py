"""A plan agrees with what a worker on a CPU then really allocates: counted where weights and cache lie."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from serve_app.engine.build import EngineLimits, build_engine
from serve_app.models.loading.load import load_causal_lm
from serve_app.planning.devices import cpu
from serve_app.planning.held import Held, panels_here
from serve_app.planning.plan import Asked, make_plan
from serve_app.planning.ranks import Split
from serve_app.planning.source import plan_model
from serve_app.planning.tensors import read_headers

COMMON = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None}
EXPERTS = {"head_dim": 64, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 64}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 64, "sliding_window": 64}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, **EXPERTS}),
    "qwen3 moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": 8, "moe_intermediate_size": 128, **EXPERTS}),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {"num_local_experts": 4, **EXPERTS}),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config, {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
        "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 48, "v_head_dim": 64, "num_key_value_heads": 4}),
}  # fmt: skip
SETTINGS = [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
CACHE_BYTES = 4 << 20


def write(folder, family):
    model_class, config_class, more = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**COMMON | more)).bfloat16()
    model.save_pretrained(folder)
    return folder


def shares(folder, dtype, quantization):
    """What is planned as a share of what is there: of weights and of the cache's bytes and tokens."""
    model = load_causal_lm(folder, dtype=dtype, quantization=quantization)
    engine = build_engine(model, EngineLimits(kv_cache_bytes=CACHE_BYTES))
    config = json.loads((folder / "config.json").read_text())
    item = 4 if dtype == "float32" else 2
    held = Held(dtype, quantization, panels_here())
    planned = plan_model("x", config, read_headers(folder), item=item, held=held)
    plan = make_plan(planned, Asked(cpu(1 << 33), kv_cache_bytes=CACHE_BYTES), Split())
    kept = sum(plane.nbytes for plane in engine.runner.kv.planes)
    blocks = plan.tokens // 32 + 1
    return {
        "weights": planned.weight_bytes / model.report["weight_bytes"],
        "tokens": plan.tokens / model.report["kv_cache_tokens"],
        "cache": blocks * 32 * plan.token_bytes / kept,
    }


@pytest.mark.parametrize("family", ["llama, tied", "qwen3 moe", "deepseek"])
def test_a_plan_agrees_with_a_worker(one_thread, tmp_path, family):
    assert shares(write(tmp_path, family), "bfloat16", "none") == pytest.approx(
        {"weights": 1, "tokens": 1, "cache": 1}, abs=0.02
    )


@pytest.mark.slow
def test_plans_agree_with_workers_of_many_models_and_settings(one_thread, tmp_path):
    """Of 32 models and settings, 95 in a hundred differ by less than two percent."""
    differences = []
    for family in FAMILIES:
        folder = write(tmp_path / family, family)
        for dtype, quantization in SETTINGS:
            found = shares(folder, dtype, quantization)
            assert found["tokens"] == found["cache"] == 1, (family, dtype, quantization)
            differences.append(abs(found["weights"] - 1))
    assert statistics.quantiles(differences, n=20)[-1] <= 0.02, sorted(differences)
