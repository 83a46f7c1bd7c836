"""A whole model on the Triton kernels gives what transformers gives."""

import dataclasses

import pytest

from serve_app.kernels.reference.operators import TORCH
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


@pytest.mark.parametrize(
    ("family", "dtype"),
    some([(f, d) for f in (*tiny.MIXTURES, "mixtral") for d in ("float32", "bfloat16")],
         names=2),
)  # fmt: skip
def test_logits_of_mixtures(family, dtype, device, tmp_path):
    from serve_app.kernels.gpu.backend import triton_operators
    from serve_app.models.loading.optimise import ALLOWED_MIXTURE

    path = tiny.write_checkpoint(tmp_path, family, num_hidden_layers=2 if family == "glm4_moe" else 1)
    model = tiny.load(path, dtype=dtype, device=device.type)
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    own = probe(model, model.forward)
    before = {p.untyped_storage().data_ptr() for p in model.module.parameters() if p.ndim == 3}
    forward = DeviceForward(parts, triton_operators(), model.max_model_len)
    allowed = 1e-5 if dtype == "float32" else ALLOWED_MIXTURE
    assert difference(probe(model, forward), own) < allowed
    for layer in forward.layers:  # the experts' weights are the modules' own
        if layer.mixture is not None:
            held = layer.mixture.experts
            assert {w.untyped_storage().data_ptr() for w in (held.gate, held.up, held.down)} <= before


@pytest.mark.parametrize(("tokens", "inner"), [(512, 512), (512, 64)])
def test_a_step_takes_what_a_plan_says(tokens, inner, tmp_path):
    """Counted on CPU tensors, operator by operator, with torch's operators between the products; their own buffers
    come on top, which kernels do without.
    """
    import json

    import torch

    from serve_app.engine.gpu.memory import largest_batch
    from serve_app.models.peak import Living
    from serve_app.planning.ranks import Split, activation_bytes
    from serve_app.planning.source import plan_model
    from serve_app.planning.tensors import read_headers

    path = tiny.write_checkpoint(tmp_path, "llama", intermediate_size=inner)
    model = tiny.load(path, dtype="bfloat16")
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    kernels = dataclasses.replace(TORCH, attention=lambda q, *_, **__: torch.empty_like(q), swiglu=shrunk)
    forward = DeviceForward(parts, dataclasses.replace(kernels, add_rms_norm=normed, rotate_and_write=queries), 1024)
    batch = largest_batch(model.kv_shape.allocate(1, "cpu"), tokens, 1, 512)
    with torch.no_grad(), Living([*model.module.parameters(), *batch.kv.planes]) as living:
        forward(batch)
    planned = activation_bytes(
        plan_model("x", json.loads((path / "config.json").read_text()), read_headers(path), item=2), Split(), tokens, 1
    )
    assert 0.9 * planned < living.peak < 1.05 * planned, (living.peak, planned)


def shrunk(x):
    return x.new_empty(len(x), x.shape[1] // 2)


def normed(x, delta, weight, eps):
    return x.new_empty(x.shape), x if delta is None else x.new_empty(x.shape)


def queries(qkv, kv, *_):
    return qkv.new_empty(len(qkv), qkv.shape[1] // kv.shape[4] - 2 * kv.shape[2], kv.shape[4])
