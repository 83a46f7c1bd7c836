"""Thresholds as published (windows, chunks, original lengths), passed with prompts that long, in narrow models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from serve_app.engine.blocks import blocks_for
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.miniature import build
from tests import tiny

NARROW = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
NEW = 10
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.08 + 7.0 * i for i in range(8)], "original_max_position_embeddings": 4096,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768}
# Name -> class, fields, and lengths of prompts; answers cross a threshold where a length is just below one.
PUBLISHED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "Phi-3.5-mini": ("Phi3", {
        "rope_parameters": LONGROPE, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "sliding_window": 262144}, [9, 4091, 4095, 4096, 4150]),
    "Phi-3-mini-4k": ("Phi3", {"sliding_window": 2047, "max_position_embeddings": 4096}, [9, 2040, 2047, 2300, 4080]),
    "Llama-4": ("Llama4", {
        "attention_chunk_size": 8192, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 96,
        "max_position_embeddings": 262144, "num_local_experts": 2, "floor_scale": 8192, "attn_scale": 0.1,
        "no_rope_layers": [1, 1, 1, 0]}, [9, 8185, 8192, 8300]),
    "Gemma-3-1B": ("Gemma3", {
        "sliding_window": 512, "num_hidden_layers": 6, "head_dim": 16, "max_position_embeddings": 32768},
        [9, 505, 512, 1400]),
    "Gemma-3-4B": ("Gemma3", {
        "sliding_window": 1024, "num_hidden_layers": 6, "head_dim": 16, "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, [9, 1020, 1024, 2200]),
    "Ministral-3": ("Ministral3", {
        "head_dim": 16, "max_position_embeddings": 262144, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        [9, 16380, 16384, 16500]),
    "Qwen2.5, yarn": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 131072}, [9, 32763]),
    "Mistral-7B-v0.1": ("Mistral", {"sliding_window": 4096, "max_position_embeddings": 32768}, [9, 4090, 4096, 4400]),
    "Llama-3.1": ("Llama", {"max_position_embeddings": 131072, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}, [9, 8188, 8300]),
    "GPT-OSS": ("GptOss", {
        "sliding_window": 128, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 131072, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}}, [9, 125, 128, 4093, 4300]),
}  # fmt: skip


def classes(name: str) -> tuple[Any, Any]:
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM"), config


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_greedy_tokens_past_published_thresholds(name, tmp_path):
    """Alone, beside each other in chunks, from the prefix cache, and after preemption."""
    family, fields, lengths = PUBLISHED[name]
    model_class, config_class = classes(family)
    build(model_class, config_class(**NARROW | fields), seed=3).save_pretrained(tmp_path)
    dense = "sdpa" if model_class._supports_sdpa else "eager"
    reference = model_class.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=dense).eval()
    prompts = [[(7 * i * i + 13 * n + 3 * i) % 250 + 3 for i in range(n)] for n in lengths]
    wanted = [tiny.reference_tokens(reference, prompt, NEW, eos_token_id=None) for prompt in prompts]
    model = load_causal_lm(tmp_path)
    blocks = sum(blocks_for(len(prompt)) for prompt in prompts)
    ways = {
        "alone": {"max_num_seqs": 1},
        "together, in chunks": {"max_batch_tokens": 1024},
        "after preemption": {"kv_cache_bytes": (blocks + 1) * model.kv_shape.block_bytes},  # no room for answers
    }
    for way, options in ways.items():
        limits = EngineLimits(max_model_len=max(lengths) + 64, **options)
        limits.kv_cache_bytes = limits.kv_cache_bytes or 2 * blocks * model.kv_shape.block_bytes
        engine = build_engine(model, limits)
        for again in range(2):
            for index, prompt in enumerate(prompts):
                engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW, ignore_eos=True))
            found = tiny.run_all(engine, max_steps=5000)
            assert again == 0 or way == "after preemption" or engine.stats.cached_tokens
            for index, right in enumerate(wanted):
                assert found[str(index)] == right, f"{way}, run {again + 1}, a prompt of {lengths[index]}"
        if way == "after preemption":  # of texts that are computed anew where they outgrow a length, none need make way
            assert engine.scheduler.preemptions or model.recompute
