"""Checkpoints with random weights in the shapes of published models, written shard by shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SHARD = 4 << 30  # bytes

_LLAMA = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
# class, configuration
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("Llama", {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 16384,
    }),
    "qwen3-0.6b": ("Qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 16384,
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
    # Eight of the 48 layers of Qwen3-30B-A3B.
    "qwen3-moe-8l": ("Qwen3Moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 16384,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
    # Eight of the 36 layers of gpt-oss-120b, experts in MXFP4.
    "gpt-oss-8l": ("GptOss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 8, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 16384,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    }),
    # Eight layers with the latent attention and the experts of GLM-4.7-Flash.
    "deepseek-8l": ("DeepseekV3", {
        "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 8, "num_attention_heads": 20,
        "num_key_value_heads": 20, "vocab_size": 154880, "max_position_embeddings": 16384, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192, "v_head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
    "tiny": ("Llama", {
        **_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    }),
}  # fmt: skip


def experts_of(config: dict[str, Any]) -> int:
    """Experts of a layer, 0 in a dense model; transformers' versions name the number differently."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name)), 0)


def _stored(family: str, name: str, like: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A parameter's tensors as a checkpoint has them; gpt-oss's experts are codes and exponents of MXFP4."""
    device = generator.device
    if like.ndim == 1:
        return {name: torch.ones(like.shape, dtype=torch.bfloat16)}
    if family == "GptOss" and like.ndim == 3:
        experts, k, n = like.shape
        blocks = torch.randint(256, (experts, n, k // 32, 16), generator=generator, device=device, dtype=torch.uint8)
        return {f"{name}_blocks": blocks.cpu(), f"{name}_scales": torch.full((experts, n, k // 32), 120).byte()}
    noise = torch.randn(like.shape, generator=generator, device=device, dtype=torch.float32)
    return {name: (noise * 0.02).to(torch.bfloat16).cpu()}


def write(name: str, folder: Path, device: str = "cpu") -> Path:
    """The directory ``folder/name`` with a bfloat16 checkpoint; one that is complete is left as it is."""
    import transformers
    from safetensors.torch import save_file

    path = folder / name
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    family, options = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**options, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    config.architectures, config.dtype = [f"{family}ForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    if family == "GptOss":
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(path)
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if shard:
            file = f"model-{len(set(where.values())):05}.safetensors"
            save_file(shard, path / file, metadata={"format": "pt"})
        shard.clear()
        size = 0

    named = dict(model.named_parameters())  # a tied head is not among them
    named |= {name: like for name, like in model.named_buffers() if name in model.state_dict()}
    for parameter_name, like in named.items():
        for key, tensor in _stored(family, parameter_name, like, generator).items():
            begun = len(set(where.values()))
            where[key] = next(reversed(where.values())) if size else f"model-{begun + 1:05}.safetensors"
            shard[key] = tensor
            size += tensor.nbytes
            total += tensor.nbytes
        if size > SHARD:
            flush()
    flush()
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return path
