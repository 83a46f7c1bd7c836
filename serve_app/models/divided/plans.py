"""By which rules ranks divide families that transformers' own plans leave out, or leave whole in part.

Words are transformers' (``base_model_tp_plan``): ``colwise`` gives each rank some of the outputs, ``rowwise`` some of
the inputs, whose results are added; ``packed`` weights consist of two that are divided each.
"""

from __future__ import annotations


def _attention(name: str = "self_attn", out: str = "o_proj") -> dict[str, str]:
    return {**{f"{name}.{each}_proj": "colwise" for each in "qkv"}, f"{name}.{out}": "rowwise"}


def _gated(name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    return {f"{name}.{gate}": "colwise", f"{name}.{up}": "colwise", f"{name}.{down}": "rowwise"}


def _layers(rules: dict[str, str]) -> dict[str, str]:
    return {f"model.layers.*.{rule}": style for rule, style in rules.items()}


# Families without a plan for dividing layers in transformers, in its words. gpt-oss keeps the weights of its experts
# transposed, gates and ups in turns.
PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.sinks": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.experts": "moe_tp_experts",
        "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "model.layers.*.mlp.experts.down_proj": "colwise",
    },
    "lfm2": _layers(_attention(out="out_proj") | _gated("feed_forward", "w1", "w3", "w2")),
    "bamba": _layers(_attention() | _gated("feed_forward")),
    "falcon_h1": _layers(_attention() | _gated("feed_forward")),
}
# What transformers' plans leave whole, below a layer: heads of latent attention, and of what makes latents the columns,
# whose sums are as narrow as a latent; shared experts.
_HEADS = {
    "self_attn.q_proj": "colwise",
    "self_attn.q_a_proj": "rowwise_split_input",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_a_proj_with_mqa": "rowwise_split_input",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_SHARED_MLP = {"shared_mlp.input_linear.weight": "packed_colwise", "shared_mlp.output_linear": "rowwise"}
MORE = {
    "deepseek_v2": _HEADS,
    "deepseek_v3": _HEADS,
    # One head of keys, which are their own values; what queries and outputs have is divided.
    "deepseek_v4": {
        "self_attn.q_a_proj": "rowwise_split_input", "self_attn.kv_proj": "rowwise_split_input",
        "self_attn.q_b_proj": "colwise", "self_attn.sinks": "colwise",
        "self_attn.o_a_proj": "grouped", "self_attn.o_b_proj": "rowwise",
        **_gated("mlp.shared_experts"),
    },
    **dict.fromkeys(("axk2", "deepseek_v32", "glm5_next_text", "glm_moe_dsa", "hy_v4"), _HEADS),
    "glm4_moe_lite": {**_HEADS, **_gated("mlp.shared_experts")},
    "qwen2_moe": _gated("mlp.shared_expert"),
    "granitemoe": _attention(),
    "granitemoehybrid": _attention() | _SHARED_MLP,
    "granitemoeshared": _attention() | _SHARED_MLP,
    "jamba": _attention() | _gated("feed_forward"),
    "kimi_linear": {rule: style for rule, style in _HEADS.items() if ".q_a" not in rule and ".q_b" not in rule},
    "lfm2_moe": _attention(out="out_proj") | _gated("feed_forward", "w1", "w3", "w2"),
    "nemotron_h": {
        **_attention("mixer"),
        "mixer.up_proj": "colwise", "mixer.down_proj": "rowwise",
        "mixer.shared_experts.up_proj": "colwise", "mixer.shared_experts.down_proj": "rowwise",
    },
}  # fmt: skip
# Mixtures whose result is the sum of what routed and shared experts give, each times a number of the row's.
SUMS = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "llama4_text", "qwen2_moe",
)  # fmt: skip
