"""Quantised models: the C++ pass agrees with the rounded weights in torch, and a token never depends on its batch."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.request import Request
from serve_app.engine.step import Scheduled, build_batch
from serve_app.kernels.decoder import decoder_library
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.compare import difference, probe
from serve_app.models.quantization import codes_of, codes_of_experts
from serve_app.sampling_params import SamplingParams
from tests import tiny

WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 331}
needs_vnni = pytest.mark.skipif(
    decoder_library(quantized=True) is None, reason="needs a compiler, AVX512_BF16 and AVX512_VNNI"
)


def load(path, quantization, dtype="bfloat16", optimise=True):
    return load_causal_lm(path, dtype=dtype, quantization=quantization, optimise=optimise)


@needs_vnni
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_cpp_pass_agrees_with_the_rounded_weights(family, name, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family, **WIDE)
    rounded, fast = load(path, name, optimise=False), load(path, name)
    assert "quantised" in fast.report["fused_decoder"]
    want, got = probe(rounded, rounded.forward), probe(fast, fast.forward)
    assert difference(got, want) < 0.05
    # And it is these weights, not the original ones, that it agrees with.
    original = load(path, "none", optimise=False)
    if name == "int4":
        assert difference(got, want) < 0.5 * difference(got, probe(original, original.forward))


@needs_vnni
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_row_does_not_depend_on_its_batch(name, threads, tmp_path):
    model = load(tiny.write_checkpoint(tmp_path, "llama", **WIDE), name)
    prompts = [[(7 * i + 3 * j) % 300 for i in range(n)] for j, n in enumerate((70, 5, 1, 64, 33, 2, 9, 12))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def logits(chosen: list[int]) -> dict[int, torch.Tensor]:
            kv = model.kv_shape.allocate(40, "cpu")
            items = []
            for place, index in enumerate(chosen):
                blocks = [1 + 3 * place + b for b in range(3)]
                request = Request(str(index), prompts[index], 1, SamplingParams(), root=b"", blocks=blocks)
                items.append(Scheduled(request, 0, len(prompts[index]), 1))
            return dict(zip(chosen, model.forward(build_batch(items, kv)), strict=True))

        together = logits(list(range(len(prompts))))
        for index in range(len(prompts)):
            assert torch.equal(logits([index])[index], together[index])
    finally:
        torch.set_num_threads(before)


def test_other_dtypes_run_on_rounded_weights(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama", **WIDE)
    model = load(path, "int4", dtype="float32")
    assert model.report["fused_decoder"] == "fused torch decoder"
    plain = load(path, "int4", dtype="float32", optimise=False)
    assert difference(probe(model, model.forward), probe(plain, plain.forward)) < 1e-4


def test_heads_keep_eight_bits_and_narrow_linears_stay(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama", **{**WIDE, "hidden_size": 96, "tie_word_embeddings": True})
    model = load(path, "int4", optimise=False)
    assert "left as they are" in model.report["quantization"]
    base = model.module.model
    assert not codes_of(base.layers[0].mlp.up_proj) and codes_of(base.layers[0].mlp.down_proj)[0].bits == 4
    wide = load(
        tiny.write_checkpoint(tmp_path / "w", "llama", **{**WIDE, "tie_word_embeddings": True}), "int4", optimise=False
    )
    assert codes_of(wide.module.lm_head)[0].bits == 8
    # The embedding keeps its own weight.
    assert not torch.equal(wide.module.lm_head.weight, wide.module.model.embed_tokens.weight)


@needs_vnni
def test_mixed_widths_run_in_cpp(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama", **{**WIDE, "hidden_size": 96})
    plain, fast = load(path, "int8", optimise=False), load(path, "int8")
    assert "quantised" in fast.report["fused_decoder"]
    assert difference(probe(fast, fast.forward), probe(plain, plain.forward)) < 0.05


@pytest.mark.parametrize("width", [96, 128])
def test_experts_are_rounded_altogether_or_not_at_all(tmp_path, width):
    """Of some sizes one weight alone has columns that fall into groups."""
    path = tiny.write_checkpoint(tmp_path, "mixtral", **WIDE | {"intermediate_size": width})
    own, rounded = (load(path, name, optimise=False).module.model.layers[0].mlp.experts for name in ("none", "int4"))
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(own, name), getattr(rounded, name)) == (width == 96)
        assert bool(codes_of_experts(rounded, name)) == (width == 128)
