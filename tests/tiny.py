"""Tiny random checkpoints of real architectures, written to disk and loaded by the product's own loader."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import engine_over
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.runner import Runner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.state_slots import StateSlots
from serve_app.kv.keys import root_key
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.models.loading.miniature import Sizes, build, scale_down
from serve_app.sampling_params import SamplingParams

COMMON = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 48}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"head_dim": 32, "sliding_window": 40, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 32},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}

# Built otherwise than Llama: GPT-2's linears hold their weights transposed, Mixtral has experts.
OTHERS = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, {}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
}

# Mixtures whose attention makes keys and values of all heads from one latent.
_LATENT = {
    "kv_lora_rank": 48, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 40,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, _LATENT),
}

# Latents, of which indexers choose some, and layers that take over what the one before them has chosen; entries that
# stand for several tokens, and windows alone.
_INDEX = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
CHOOSING = {
    "glm_moe_dsa": (
        GlmMoeDsaConfig, GlmMoeDsaForCausalLM, {**_LATENT, **_INDEX, "indexer_types": ["full", "shared", "full"]}
    ),
    "deepseek_v4": (
        DeepseekV4Config,
        DeepseekV4ForCausalLM,
        {
            **_INDEX, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "sliding_window": 24,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64},
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
    ),
}  # fmt: skip

# Mixtures whose experts differ from Mixtral's in how their weights lie.
MIXTURES = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {"head_dim": 32, "num_local_experts": 4, "sliding_window": 40}),
    # A shared expert twice as wide as the others, behind a gate of its own.
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # Sigmoids, corrected, in groups, with a factor behind; the first layer is dense.
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
        },
    ),
}

# Every second layer keeps a state.
STATEFUL = {
    # Its tokens go through layers one by one behind a state.
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            "full_attention_interval": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "linear_num_value_heads": 4,
            "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
}  # fmt: skip


def write_checkpoint(path: Path, family: str, *, seed: int = 0, **overrides: object) -> Path:
    """A random float32 checkpoint. Weights are spread wider than at initialisation so that greedy choices are
    clear-cut.
    """
    config_class, model_class, extra = (FAMILIES | OTHERS | LATENT | CHOOSING | MIXTURES | STATEFUL)[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**COMMON, **extra, **overrides}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.08 if "embed" not in name else 0.5)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0, 0.1)
    model.save_pretrained(path)
    return path


def write_small(path: Path, model_class: type, *, seed: int = 0, **overrides: object) -> Path:
    """A random float32 checkpoint of any class, as large as the check at load makes one."""
    config = scale_down(model_class.config_class(), Sizes(context=1024, vocab=256), **overrides)
    build(model_class, config, seed).save_pretrained(path)
    return path


def load_reference(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference_tokens(model: torch.nn.Module, prompt: list[int], count: int, **options: object) -> list[int]:
    """What transformers' ``generate`` makes of a prompt, greedily unless told otherwise."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def make_engine(model: CausalModel, *, num_blocks: int = 64, kept: int = 64, **options: object) -> Engine:
    """``kept``: slots beside those of running texts, of models whose layers keep states."""
    parts = {k: options.pop(k) for k in ("speculation", "exporter") if k in options}
    scheduler = Scheduler(
        BlockPool(num_blocks), max_model_len=model.max_model_len, eos_token_ids=model.eos_token_ids, **options
    )
    slots = 2 * scheduler.max_num_seqs + kept
    kv = model.kv_shape.allocate(num_blocks, model.device, slots)
    if kv.shape.states.parts:
        scheduler.states = StateSlots(slots, scheduler.max_num_seqs)
    engine = engine_over(Runner(model.forward, kv), scheduler)
    engine.speculation, engine.exporter = parts.get("speculation"), parts.get("exporter")
    return engine


ROOT = root_key(b"test", "", b"tenant")


def make_request(
    name: str, prompt: list[int], *, root: bytes = ROOT, prefill_only: bool = False, **sampling
) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **sampling})
    return Request(name, list(prompt), len(prompt), params, root, prefill_only=prefill_only)


def run_all(engine: Engine, *, max_steps: int = 2000) -> dict[str, list[int]]:
    """Steps until idle; the generated tokens of every request, checked to be delivered in order."""
    outputs: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            got = outputs.setdefault(output.request_id, [])
            assert output.offset == len(got)
            got += output.token_ids
    raise AssertionError(f"still busy after {max_steps} steps")


def load(path: Path, **options: object) -> CausalModel:
    return load_causal_lm(path, **{"optimise": False, **options})
