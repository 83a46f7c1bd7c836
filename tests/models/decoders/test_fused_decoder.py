"""The generic layer: what it accepts gives the model's own results; other models keep transformers' forward."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from serve_app.kernels.decoder import decoder_library
from serve_app.models.decoders import decoder_parts
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.variants import some

STANDARD = ["llama", "qwen2", "qwen3", "mistral", "phi3"]
# Sizes that the C++ pass takes.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
NEW_TOKENS = 24
needs_bf16_dot = pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")


@pytest.fixture(autouse=True)
def more_families(monkeypatch):
    monkeypatch.setitem(tiny.FAMILIES, "granite", (GraniteConfig, GraniteForCausalLM, {"residual_multiplier": 0.5}))
    monkeypatch.setitem(tiny.FAMILIES, "olmo2", (Olmo2Config, Olmo2ForCausalLM, {}))
    monkeypatch.setitem(tiny.FAMILIES, "llama-gelu", (LlamaConfig, LlamaForCausalLM, {"hidden_act": "gelu"}))
    monkeypatch.setitem(
        tiny.FAMILIES, "llama-biased", (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True})
    )
    monkeypatch.setitem(
        tiny.FAMILIES,
        "llama-dynamic",
        (
            LlamaConfig,
            LlamaForCausalLM,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ),
    )


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", some(STANDARD, "qwen3", "phi3"))
def test_float32_tokens_equal_generate(family, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    model = tiny.load(path, optimise=True)
    assert model.report["fused_decoder"] == "fused torch decoder"
    reference = tiny.load_reference(path)
    engine = tiny.make_engine(model, num_blocks=200, max_batch_tokens=64)
    for index, prompt in enumerate(prompts(10)):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS))
    outputs = tiny.run_all(engine)
    for index, prompt in enumerate(prompts(10)):
        assert outputs[str(index)] == tiny.reference_tokens(reference, prompt, NEW_TOKENS)


@needs_bf16_dot
@pytest.mark.parametrize("family", [*STANDARD, "llama-biased"])
def test_cpp_pass_is_as_close_to_float32_as_transformers(family, tmp_path):
    extra = {"head_dim": None} if family == "phi3" else {}
    sizes = {k: v for k, v in {**WIDE, **extra}.items() if v is not None}
    path = tiny.write_checkpoint(tmp_path, family, **sizes)
    exact = tiny.load(path, dtype="float32")
    own = tiny.load(path, dtype="bfloat16")
    fast = tiny.load(path, dtype="bfloat16", optimise=True)
    assert fast.report["fused_decoder"].startswith("C++ decoder")
    truth = probe(exact, exact.forward)
    error = difference(probe(fast, fast.forward), truth)
    assert error < 1.3 * difference(probe(own, own.forward), truth)


RUNS = [("qwen3", 1), ("qwen3", 2), ("qwen3_moe", 2), ("qwen3", 3), ("gpt_oss", 3)]


@needs_bf16_dot
@pytest.mark.parametrize("run", some(RUNS, ("qwen3", 1), ("gpt_oss", 3)), ids=str)
def test_cpp_pass_in_an_engine(run, tmp_path):
    """Chunks, mixed batches and any number of threads give what one request alone gives, up to bfloat16's ties."""
    family, threads = run
    more = {"qwen3_moe": {"moe_intermediate_size": 96}}.get(family, {})
    path = tiny.write_checkpoint(tmp_path, family, **WIDE | more)
    model = tiny.load(path, dtype="bfloat16", optimise=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = tiny.make_engine(model, num_blocks=200, max_batch_tokens=40)
        for index, prompt in enumerate(prompts(12)):
            engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS))
        together = tiny.run_all(engine)
        alone = {}
        for index, prompt in enumerate(prompts(12)):
            engine = tiny.make_engine(model)
            engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS))
            alone |= tiny.run_all(engine)
    finally:
        torch.set_num_threads(before)
    same = sum(together[i][:8] == alone[i][:8] for i in alone)
    assert same >= 10, (together, alone)


MIXTURES = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 96},
    "qwen3_moe, some layers dense": {"moe_intermediate_size": 96, "mlp_only_layers": [1]},
    "qwen3_moe, weights of all": {"moe_intermediate_size": 96, "norm_topk_prob": False, "num_experts": 70},
    "gpt_oss": {},
    "qwen2_moe": {},
    "qwen2_moe, a shared expert of another width": {"shared_expert_intermediate_size": 80},
    "glm4_moe": {"head_dim": 64},
    "glm4_moe, as they are, without groups": {"head_dim": 64, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("case", some(list(MIXTURES), "gpt_oss"))
def test_float32_tokens_of_mixtures_equal_generate(case, tmp_path):
    path = tiny.write_checkpoint(tmp_path, case.partition(",")[0], **WIDE | MIXTURES[case])
    model = tiny.load(path, optimise=True)
    assert model.report["fused_decoder"] == "fused torch decoder"
    reference = tiny.load_reference(path)
    engine = tiny.make_engine(model, num_blocks=200, max_batch_tokens=64)
    for index, prompt in enumerate(prompts(3)):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=6))
    outputs = tiny.run_all(engine)
    for index, prompt in enumerate(prompts(3)):
        assert outputs[str(index)] == tiny.reference_tokens(reference, prompt, 6)


PACKED = [(case, compact) for case in MIXTURES for compact in (False, True)]


@needs_bf16_dot
@pytest.mark.parametrize("packed", some(PACKED, ("mixtral", True), ("gpt_oss", False)), ids=str)
def test_experts_in_the_cpp_pass_are_as_close_to_float32_as_transformers(packed, tmp_path, monkeypatch):
    """With weights in 16 and in 12 bits, for few rows and for many."""
    case, compact = packed
    monkeypatch.setattr("serve_app.kernels.linear.panels.COMPACT_ABOVE_BYTES", 0 if compact else 1 << 40)
    path = tiny.write_checkpoint(tmp_path, case.partition(",")[0], **WIDE | MIXTURES[case])
    exact = tiny.load(path, dtype="float32")
    own = tiny.load(path, dtype="bfloat16")
    fast = tiny.load(path, dtype="bfloat16", optimise=True)
    assert fast.report["fused_decoder"].startswith("C++ decoder")
    assert ("as if they were" in fast.report["fused_decoder"]) == compact
    truth = probe(exact, exact.forward)
    error = difference(probe(fast, fast.forward), truth)
    assert error < 1.3 * difference(probe(own, own.forward), truth)


ROUNDED = [(case, bits) for case in ("mixtral", "gpt_oss", "qwen2_moe") for bits in ("int8", "int4")]


@needs_bf16_dot
@pytest.mark.skipif(decoder_library(quantized=True) is None, reason="needs AVX512_VNNI")
@pytest.mark.parametrize("run", some(ROUNDED, ("gpt_oss", "int4"), ("qwen2_moe", "int8")), ids=str)
def test_rounded_experts_compute_in_8_bits(run, tmp_path):
    """They give what their rounded values give, up to the rounding of rows to 8 bits; one row, few and many."""
    case, name = run
    sizes = {**WIDE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    path = tiny.write_checkpoint(tmp_path, case, **sizes)
    model = tiny.load(path, dtype="bfloat16", optimise=True, quantization=name)
    assert "quantised" in model.report["fused_decoder"] and "experts" in model.report["quantization"]
    own = tiny.load(path, dtype="bfloat16", quantization=name)
    assert model.forward.packed_bytes < 0.7 * 2 * sum(p.numel() for p in own.module.parameters())
    assert difference(probe(model, model.forward), probe(own, own.forward)) < 0.15
    tokens = [7 * i % 250 + 3 for i in range(40)]
    together = row_logits(model, tokens)
    for some_rows in (tokens[:1], tokens[:6]):
        assert torch.equal(row_logits(model, some_rows), together[: len(some_rows)])


def row_logits(model, tokens):
    """Of requests of one token each, in one batch."""
    from serve_app.engine.request import Request
    from serve_app.engine.step import Scheduled, build_batch
    from serve_app.sampling_params import SamplingParams

    kv = model.kv_shape.allocate(len(tokens) + 1, "cpu")
    requests = [Request(str(i), [t], 1, SamplingParams(), b"", blocks=[i + 1]) for i, t in enumerate(tokens)]
    return model.forward(build_batch([Scheduled(r, 0, 1, 1) for r in requests], kv))


@needs_bf16_dot
@pytest.mark.parametrize("rows", [8, 40])
def test_a_row_s_experts_do_not_depend_on_its_batch(rows, tmp_path):
    """Its logits are equal to the last bit, alone and beside others."""
    path = tiny.write_checkpoint(tmp_path, "qwen3_moe", **WIDE, moe_intermediate_size=96)
    model = tiny.load(path, dtype="bfloat16", optimise=True)
    tokens = [7 * i % 250 + 3 for i in range(rows)]
    together = row_logits(model, tokens)
    for index in range(0, rows, 3):
        assert torch.equal(together[index], row_logits(model, [tokens[index]])[0])


@needs_bf16_dot
def test_logits_that_are_not_numbers_choose_experts_all_the_same(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "qwen3_moe", **WIDE, moe_intermediate_size=96)
    model = tiny.load(path, dtype="bfloat16", optimise=True)
    model.forward._keep[0].fill_(float("nan"))  # the embedding
    assert probe(model, model.forward).isnan().all()


@needs_bf16_dot
def test_experts_of_odd_sizes_keep_torchs_pass(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "qwen3_moe", **WIDE, moe_intermediate_size=40)
    model = tiny.load(path, dtype="bfloat16", optimise=True)
    assert model.report["fused_decoder"] == "fused torch decoder"


@needs_bf16_dot
def test_only_sampled_rows_and_odd_vocabulary(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama", vocab_size=331, **WIDE)
    own = tiny.load(path, dtype="bfloat16")
    fast = tiny.load(path, dtype="bfloat16", optimise=True)
    assert fast.report["fused_decoder"].startswith("C++ decoder")
    got, want = probe(fast, fast.forward), probe(own, own.forward)
    assert got.shape == want.shape == (46, 331)
    assert difference(got, want) < 0.05


@needs_bf16_dot
def test_contradictory_batches_are_refused(tmp_path):
    from serve_app.engine.request import Request
    from serve_app.engine.step import Scheduled, build_batch
    from serve_app.sampling_params import SamplingParams

    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama", **WIDE), dtype="bfloat16", optimise=True)
    kv = model.kv_shape.allocate(3, "cpu")
    for tokens, blocks, reason in [([999], [1], "token id"), ([-1], [1], "token id"), ([5], [7], "block id")]:
        request = Request("x", tokens, 1, SamplingParams(), root=b"", blocks=blocks)
        with pytest.raises(ValueError, match=reason):
            model.forward(build_batch([Scheduled(request, 0, 1, 1)], kv))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "embed_tokens is a Gemma2TextScaledWordEmbedding"),
        ("olmo2", "Olmo2DecoderLayer has post_feedforward_layernorm"),
        ("llama-gelu", "activation is not SiLU"),
        ("llama-dynamic", "rotary embedding of type dynamic"),
        ("granite", "differs by"),
    ],
)
def test_other_models_keep_their_forward(family, reason, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    model = tiny.load(path, optimise=True)
    assert "fused_decoder" not in model.report
    assert reason in model.report["transformers_forward"]
    reference = tiny.load_reference(path)
    engine = tiny.make_engine(model)
    engine.add(tiny.make_request("0", prompts(1)[0], max_tokens=NEW_TOKENS))
    assert tiny.run_all(engine) == {"0": tiny.reference_tokens(reference, prompts(1)[0], NEW_TOKENS)}


def test_a_missing_part_is_named(tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama"))
    del model.module.model.layers[1].post_attention_layernorm
    calls = tiny.load(tiny.write_checkpoint(tmp_path / "whole", "llama"))
    with pytest.raises(decoder_parts.NotStandard, match="has no post_attention_layernorm"):
        decoder_parts.read_model(model, lambda: probe(calls, calls.forward))
