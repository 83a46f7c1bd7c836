"""Checkpoints whose experts are floats of four bits (MXFP4) are served as what they stand for, and stay small."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.kernels.decoder import decoder_library
from serve_app.models.loading.optimise import difference, probe
from tests import tiny

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}
TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, k, n] as blocks [E, n, k / 32, 16], two codes a byte, and scales [E, n, k / 32], biased by 127."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = grouped.abs().amax(-1).log2().floor() - 2
    scaled = grouped / (2**exponent)[..., None]
    codes = (scaled.abs()[..., None] - TABLE).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("mxfp4"), "gpt_oss", **SIZES)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(tensors.pop(name))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(told))
    return path


def test_greedy_tokens_equal_transformers(checkpoint):
    prompt = [(7 * i * i + 5) % 250 for i in range(40)]
    wanted = tiny.reference_tokens(tiny.load_reference(checkpoint), prompt, 8)
    engine = tiny.make_engine(tiny.load(checkpoint, dtype="float32", optimise=True))
    engine.add(tiny.make_request("x", prompt, max_tokens=8))
    assert tiny.run_all(engine)["x"] == wanted


@pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")
def test_experts_lie_in_four_bits_in_the_cpp_pass(checkpoint, monkeypatch):
    monkeypatch.setattr("serve_app.kernels.linear.panels.COMPACT_ABOVE_BYTES", 0)
    exact, own = tiny.load(checkpoint, dtype="float32"), tiny.load(checkpoint, dtype="bfloat16")
    fast = tiny.load(checkpoint, dtype="bfloat16", optimise=True)
    assert fast.report["fused_decoder"].startswith("C++ decoder")
    experts = 2 * 4 * 3 * 128 * 192
    assert fast.forward.packed_bytes <= fast.forward.plain_bytes - experts * (2 - 17 / 32)
    truth = probe(exact, exact.forward)
    assert difference(probe(fast, fast.forward), truth) < 1.3 * difference(probe(own, own.forward), truth)
