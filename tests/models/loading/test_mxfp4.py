"""Checkpoints whose experts are floats of four bits (MXFP4) are served as what they stand for, and stay small."""

from __future__ import annotations

import pytest

from serve_app.kernels.decoder import decoder_library
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.packed import write_float4

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_float4(tmp_path_factory.mktemp("mxfp4"), **SIZES)


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
