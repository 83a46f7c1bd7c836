"""Experts on packed weights compute what transformers' own functions do."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from serve_app.kernels.linear.packed import packing_available
from serve_app.models.experts import NAME, pack_experts
from serve_app.models.miniature import build, scale_down

FAMILIES = [
    (MixtralForCausalLM, MixtralConfig),
    (Qwen3MoeForCausalLM, Qwen3MoeConfig),
    (GptOssForCausalLM, GptOssConfig),  # biases, transposed weights, a gate of its own
]


@pytest.mark.parametrize(("model_class", "config"), FAMILIES, ids=lambda value: value.__name__)
@torch.inference_mode()
def test_the_same_logits_from_packed_experts(model_class, config):
    if not packing_available(torch.float32):
        pytest.skip("this torch build cannot pack float32")
    model = build(model_class, scale_down(config()))
    for length in (1, 3, 40):
        ids = torch.arange(length)[None] * 7 % 250 + 3
        if length == 1:
            wanted = {}
        wanted[length] = model(input_ids=ids, use_cache=False).logits
    before = sum(p.numel() for p in model.parameters())
    layers = model.config.num_hidden_layers
    assert pack_experts(model) == layers * 4
    assert sum(p.numel() for p in model.parameters()) < before and model.config._experts_implementation == NAME
    for length, logits in wanted.items():
        ids = torch.arange(length)[None] * 7 % 250 + 3
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits, atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_experts_of_another_form_stay():
    model = build(Llama4ForCausalLM, scale_down(Llama4TextConfig()))
    ids = torch.arange(9)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    pack_experts(model)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_a_mixture_may_choose_no_expert():
    if not packing_available(torch.float32):
        pytest.skip("this torch build cannot pack float32")
    model = build(MixtralForCausalLM, scale_down(MixtralConfig(), num_experts_per_tok=0))
    ids = torch.arange(9)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    assert pack_experts(model) > 0
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, atol=2e-4, rtol=1e-3)
