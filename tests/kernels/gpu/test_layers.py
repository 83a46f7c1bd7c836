"""A whole model on the Triton kernels gives what transformers gives."""

import pytest

from serve_app.models.decoders import decoder_parts
from serve_app.models.decoders.device import DeviceForward
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.variants import some


@pytest.mark.parametrize(
    ("family", "dtype", "allowed"),
    some([("qwen3", "float32", 1e-5), ("phi3", "bfloat16", 0.03)], ("qwen3", "float32", 1e-5), names=3),
)
def test_logits(family, dtype, allowed, device, tmp_path):
    from serve_app.kernels.gpu.backend import triton_operators

    path = tiny.write_checkpoint(tmp_path, family, num_hidden_layers=1)
    model = tiny.load(path, dtype=dtype, device=device.type)
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    forward = DeviceForward(parts, triton_operators(), model.max_model_len)
    assert difference(probe(model, forward), probe(model, model.forward)) < allowed
