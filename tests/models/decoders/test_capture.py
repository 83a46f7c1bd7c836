"""Hidden states of chosen layers, asked for with a batch: the same on every forward path."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.step import Capture, Scheduled, build_batch
from serve_app.kernels.decoder import decoder_library
from tests import tiny
from tests.variants import some

PROMPT = [(7 * i + 3) % 256 for i in range(40)]
LAYERS = (2, 0, 1)


def captured(model, layers=LAYERS, samples=1):
    request = tiny.make_request("x", PROMPT)
    request.blocks = [2, 1]
    batch = build_batch([Scheduled(request, 0, len(PROMPT), samples)], model.kv_shape.allocate(4, "cpu"))
    with torch.inference_mode():
        plain = model.forward(batch)
        batch.capture = Capture(layers)
        assert torch.equal(model.forward(batch), plain)
    return batch.capture.states


def expected(path):
    with torch.inference_mode():
        states = tiny.load_reference(path)(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    return torch.stack([states[i][0] for i in LAYERS], 1)


@pytest.mark.parametrize("optimise", [False, True], ids=["transformers", "fused"])
@pytest.mark.parametrize("family", some(tiny.FAMILIES, "llama", "gemma2"))
def test_what_enters_a_layer_is_recorded(family, optimise, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    states = captured(tiny.load(path, optimise=optimise))
    torch.testing.assert_close(states, expected(path), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_the_cpp_pass_records_as_well(samples, tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=192, head_dim=32)
    model = tiny.load(path, dtype="bfloat16", optimise=True)
    assert model.report["fused_decoder"].startswith("C++ decoder")
    states = captured(model, samples=samples)
    assert states.dtype == torch.bfloat16
    torch.testing.assert_close(states.float(), expected(path), rtol=0.05, atol=0.1)
