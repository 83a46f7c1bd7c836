"""float8 weights and cache: what they compute, what they cost, and that all paths to the cache know them."""

from __future__ import annotations

import pytest
import torch

from serve_app.kernels.linear.fp8 import E4M3, Fp8Linear, quantize_rows
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.compare import difference, probe
from serve_app.models.loading.folder import UnsupportedModel
from tests import tiny
from tests.parity.test_generate import prefill, stored_prefix


def test_rows_are_rounded_to_three_bits():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1, 5, 1e4, 0]).view(5, 1)
    codes, scale = quantize_rows(x)
    assert codes.dtype == E4M3 and scale.shape == (5, 1)
    torch.testing.assert_close(codes.float() * scale, x, rtol=2**-4, atol=float(x.abs().max()) * 0)
    assert float(codes.float().abs().max()) == 448


def test_a_linear_is_the_product_of_the_rounded(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(s, generator=generator) for s in ((32, 48), (32,), (7, 48)))
    got = Fp8Linear(weight, bias)(x)
    rounded = [codes.float() * scale for codes, scale in (quantize_rows(x), quantize_rows(weight))]
    torch.testing.assert_close(got, rounded[0] @ rounded[1].T + bias)
    assert 0.001 < difference(got, x @ weight.T + bias) < 0.05
    with pytest.raises(ValueError, match="multiples of 16"):
        Fp8Linear(torch.zeros(8, 16), None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_float8_is_close_to_itself(dtype, tmp_path):
    path = tiny.write_checkpoint(tmp_path, "qwen3")
    exact = load_causal_lm(path, dtype=dtype, optimise=False)
    rounded = load_causal_lm(path, dtype=dtype, quantization="fp8")
    assert rounded.report["fused_decoder"].startswith("fused layers in float8")
    assert 0.005 < difference(probe(rounded, rounded.forward), probe(exact, exact.forward)) < 0.15


def test_layers_that_cannot_are_refused(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "gemma2")
    with pytest.raises(UnsupportedModel, match="quantization: none"):
        load_causal_lm(path, quantization="fp8")


@pytest.mark.parametrize("optimise", [True, False])
def test_a_float8_cache_is_close_and_half_as_large(optimise, tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama")
    exact = load_causal_lm(path, dtype="bfloat16", optimise=False)
    model = load_causal_lm(path, dtype="bfloat16", kv_cache_dtype="fp8", optimise=optimise)
    assert model.kv_shape.block_bytes * 2 == exact.kv_shape.block_bytes
    assert model.kv_shape.dtype_name == "float8_e4m3fn"
    assert 0.001 < difference(probe(model, model.forward), probe(exact, exact.forward)) < 0.1


def test_a_float8_cache_travels(tmp_path):
    """Chunks cut out by one engine and loaded by another give the tokens of an engine that computed all."""
    model = load_causal_lm(tiny.write_checkpoint(tmp_path, "llama"), dtype="bfloat16", kv_cache_dtype="fp8")
    prompt = [(7 * i + 3) % 250 + 3 for i in range(300)]
    alone = tiny.make_engine(model)
    alone.add(tiny.make_request("x", prompt, max_tokens=12))
    expected = tiny.run_all(alone)["x"]
    engine = tiny.make_engine(model)
    engine.add(tiny.make_request("x", prompt, max_tokens=12), stored_prefix(model, prefill(model, prompt[:-1])))
    assert tiny.run_all(engine)["x"] == expected
    assert engine.stats.cached_tokens == 299


def test_roundings_of_deep_models_are_allowed_for():
    from serve_app.models.loading.optimise import ALLOWED_QUANTIZED, allowed_quantized

    # With random weights the difference was 0.14 after 32 layers, and grows with their square root.
    assert allowed_quantized(4) == ALLOWED_QUANTIZED
    assert all(allowed_quantized(layers) > 1.5 * 0.14 * (layers / 32) ** 0.5 for layers in (32, 64, 80))
    assert allowed_quantized(1000) < 1
