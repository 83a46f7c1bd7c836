"""Experts on packed weights compute what transformers' own functions do."""

from __future__ import annotations

import numpy as np
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

from serve_app.engine.encoder.types import EncodeBatch
from serve_app.kernels.linear.packed import packing_available
from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.loading.miniature import build, scale_down
from serve_app.models.mixtures import scaled
from serve_app.models.mixtures.experts import NAME, experts_forward, pack_experts
from serve_app.models.mixtures.scaled import pack_scaled, route_scaled
from tests import tiny
from tests.variants import some

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


@pytest.mark.parametrize("chosen", [1, 3])
@torch.inference_mode()
def test_experts_whose_rows_are_scaled(chosen):
    """Llama 4's are of another form than the others."""
    if not packing_available(torch.float32):
        pytest.skip("this torch build cannot pack float32")
    model = build(Llama4ForCausalLM, scale_down(Llama4TextConfig(), num_experts_per_tok=chosen))
    mixtures = sum(hasattr(layer.feed_forward, "experts") for layer in model.model.layers)
    ids = torch.arange(9)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    # By the numbers of experts, as on GPUs, and then packed as well.
    assert route_scaled(model) == 4 * mixtures > 0
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, atol=2e-4, rtol=1e-3)
    assert pack_experts(model) == 0 and pack_scaled(model) == 4 * mixtures
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_rows_go_to_the_experts_that_they_have_chosen_alone(monkeypatch):
    """transformers computes all of them for every row."""
    model = build(Llama4ForCausalLM, scale_down(Llama4TextConfig(), num_experts_per_tok=2))
    block = model.model.layers[0].feed_forward
    assert route_scaled(model) > 0
    seen = []
    monkeypatch.setattr(scaled, "_mixed", lambda experts, rows, chosen: (seen.append(len(rows)), rows)[1])
    block(torch.randn(5, model.config.hidden_size))
    assert seen == [10]


@torch.inference_mode()
def test_blocks_that_compute_something_else_stay_as_they_are():
    model = build(Llama4ForCausalLM, scale_down(Llama4TextConfig()))
    blocks = [layer.feed_forward for layer in model.model.layers if hasattr(layer.feed_forward, "experts")]
    other = type(blocks[0].experts)

    class Other(other):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    for block in blocks:
        block.experts.__class__ = Other
    ids = torch.arange(9)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    assert route_scaled(model) == pack_scaled(model) == 0
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)


@torch.inference_mode()
def test_a_mixture_may_choose_no_expert():
    if not packing_available(torch.float32):
        pytest.skip("this torch build cannot pack float32")
    model = build(MixtralForCausalLM, scale_down(MixtralConfig(), num_experts_per_tok=0))
    ids = torch.arange(9)[None]
    wanted = model(input_ids=ids, use_cache=False).logits
    assert pack_experts(model) > 0
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, atol=2e-4, rtol=1e-3)


ODD = [("mixtral", {"intermediate_size": 91, "hidden_size": 72}), ("qwen3_moe", {"moe_intermediate_size": 45})]


@pytest.fixture
def qwen3_moe(monkeypatch):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    monkeypatch.setitem(tiny.OTHERS, "qwen3_moe", (Qwen3MoeConfig, Qwen3MoeForCausalLM, extra))


@pytest.mark.parametrize(("family", "sizes"), some(ODD, ODD[0], names=2), ids=[family for family, _ in ODD])
def test_experts_that_torchs_grouped_product_does_not_take(tmp_path, qwen3_moe, family, sizes):
    """Rows of other than a multiple of 16 bytes; transformers itself computes them in eager mode alone."""
    path = tiny.write_checkpoint(tmp_path, family, num_hidden_layers=2, **sizes)
    reference = tiny.load_reference(path)
    reference.set_experts_implementation("eager")
    prompt = [(7 * i * i + 5) % 250 for i in range(40)]
    wanted = tiny.reference_tokens(reference, prompt, 6, eos_token_id=None)
    for optimise in (False, True):
        model = tiny.load(path, optimise=optimise)
        assert model.module.config._experts_implementation == (NAME if optimise else "eager")
        engine = tiny.make_engine(model)
        engine.add(tiny.make_request("x", prompt, max_tokens=6, ignore_eos=True))
        assert tiny.run_all(engine)["x"] == wanted


def test_an_embedder_with_such_experts(tmp_path, qwen3_moe):
    path = tiny.write_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, moe_intermediate_size=45)
    model = load_encoder(path, "embeddings", pooling="mean")
    ids = np.arange(5, 25, dtype=np.int32)
    own = tiny.load_reference(path)
    own.set_experts_implementation("eager")
    with torch.inference_mode():
        wanted = own.model(input_ids=torch.from_numpy(ids).long()[None]).last_hidden_state.mean(1)
    batch = EncodeBatch(ids, np.zeros_like(ids), np.array([len(ids)], np.int64), ["mean"])
    torch.testing.assert_close(torch.from_numpy(model.forward(batch)), wanted, atol=1e-4, rtol=1e-3)


@torch.inference_mode()
def test_such_experts_beside_packed_ones():
    """The configuration is one for all layers; what could not be packed runs as its class is written."""
    model = build(MixtralForCausalLM, scale_down(MixtralConfig(), intermediate_size=91))
    experts = model.model.layers[0].mlp.experts
    x, chosen, weights = torch.randn(5, 128), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    model.config._experts_implementation_internal = "eager"
    wanted = experts(x, chosen, weights)
    torch.testing.assert_close(experts_forward(experts, x, chosen, weights), wanted)
