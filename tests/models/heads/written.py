"""Random EAGLE-3 heads written the way they are published, and the plainest possible reading of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 256,
    "draft_vocab_size": 100,
    "tie_word_embeddings": False,
}


def write_head(path: Path, *, layout: str = "eagle", seed: int = 0, edit=None, **config: object) -> Path:
    """``layout`` eagle (SafeAILab, SpecForge) or speculators; ``edit(tensors)`` may spoil them."""
    told = {**CONFIG, **config}
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5)

    hidden, inner = told["hidden_size"], told["intermediate_size"]
    dim = told.get("head_dim") or hidden // told["num_attention_heads"]
    q, kv = told["num_attention_heads"] * dim, told["num_key_value_heads"] * dim
    target = told.get("target_hidden_size") or hidden
    layer = "midlayer" if layout == "eagle" else "layers.0"
    norms = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    tensors = {f"{layer}.{name}.weight": 1 + 0.1 * random(hidden) for name in sorted(norms)}
    shapes = {"self_attn.q_proj": (q, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden),
              "self_attn.v_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden),
              "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}  # fmt: skip
    tensors |= {f"{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    ids = torch.randperm(told["vocab_size"], generator=generator)[: told["draft_vocab_size"]].sort().values
    tensors |= {
        "fc.weight": random(hidden, 3 * target),
        "norm.weight": 1 + 0.1 * random(hidden),
        "lm_head.weight": random(told["draft_vocab_size"], hidden),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(told["vocab_size"], dtype=torch.bool).index_fill(0, ids, True),
    }
    if told.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.1 * random(3 * target)
    if told.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + 0.1 * random(target) for i in range(3)}
    if target != hidden:
        tensors["embed_tokens.weight"] = random(told["vocab_size"], hidden)
    if edit is not None:
        edit(tensors)
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    if layout == "speculators":
        own = {"draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm",
               "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "tie_word_embeddings"}  # fmt: skip
        told = {
            **{k: told.pop(k) for k in own if k in told},
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": told,
        }
    (path / "config.json").write_text(json.dumps(told))
    return path


def plain_head(tensors: dict, config: dict, embedding, states, ids, feedback=None):
    """Dense float32 pass over one whole sequence: the next drafts' ids [T] and the hidden states to feed back [T, H].

    ``states`` [T, 3, target hidden] of the target, ``ids`` [T] the following tokens; ``feedback`` replaces the fused
    states of the last len(feedback) slots.
    """
    weights = {k.removeprefix("midlayer.").removeprefix("layers.0."): v.float() for k, v in tensors.items()}
    eps, heads, kv_heads = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    norm = lambda x, name: F.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], eps)  # noqa: E731
    linear = lambda x, name: x @ weights[f"{name}.weight"].T  # noqa: E731
    states = states.float()
    if config.get("fc_norm"):
        states = torch.stack([norm(states[:, i], f"fc_norm.{i}") for i in range(3)], 1)
    states = states.flatten(1)
    if config.get("norm_before_fc"):
        states = norm(states, "input_norm")
    hidden = linear(states, "fc")
    if feedback is not None:
        hidden = torch.cat([hidden, feedback])
    count = len(ids)
    x = torch.cat(
        [norm(weights.get("embed_tokens.weight", embedding)[ids], "input_layernorm"), norm(hidden, "hidden_norm")], -1
    )
    residual = norm(hidden, "hidden_norm") if config.get("norm_before_residual") else hidden
    q, k, v = (
        linear(x, f"self_attn.{n}_proj").view(count, -1, weights["self_attn.q_proj.weight"].shape[0] // heads)
        for n in "qkv"
    )
    dim = q.shape[-1]
    angles = torch.arange(count)[:, None] * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turn = lambda t: torch.cat([t[..., : dim // 2] * cos - t[..., dim // 2 :] * sin,  # noqa: E731
                                t[..., dim // 2 :] * cos + t[..., : dim // 2] * sin], -1)  # fmt: skip
    q, k = turn(q), turn(k)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
    hidden = residual + linear(attended, "self_attn.o_proj")
    y = norm(hidden, "post_attention_layernorm")
    hidden = hidden + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    normed = norm(hidden, "norm")
    draft = linear(normed, "lm_head").argmax(-1)
    return draft + tensors["d2t"][draft], normed if config.get("norm_output") else hidden
