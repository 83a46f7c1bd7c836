"""The layers as GPUs run them, on CPU tensors: the same results as the model's own modules, and one copy of weights."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from serve_app.kernels.reference.operators import TORCH
from serve_app.models.decoders import decoder_parts, device, fused_decoder
from serve_app.models.decoders.device import DeviceForward
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.variants import some

STANDARD = ["llama", "qwen2", "qwen3", "mistral", "phi3"]


def build(path, **options) -> tuple:
    model = tiny.load(path, **options)
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    return model, DeviceForward(parts, TORCH, model.max_model_len)


@pytest.mark.parametrize("family", some(STANDARD, "qwen3"))
def test_tokens_equal_generate(family, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    reference = tiny.load_reference(path)
    model, forward = build(path)
    own = probe(model, model.forward)
    assert difference(probe(model, forward), own) < 1e-5
    engine = tiny.make_engine(dataclasses.replace(model, forward=forward), num_blocks=200, max_batch_tokens=64)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 256) for _ in range(rng.randrange(1, 150))] for _ in range(8)]
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=24))
    outputs = tiny.run_all(engine)
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)] == tiny.reference_tokens(reference, prompt, 24)


def test_weights_are_held_once(tmp_path):
    """The fused weight is the modules' own: those still run, and changing it changes them."""
    model, forward = build(tiny.write_checkpoint(tmp_path, "llama"))
    before = probe(model, model.forward)
    attention = model.module.model.layers[1].self_attn
    fused = forward.layers[1].qkv.weight
    assert fused.untyped_storage().data_ptr() == attention.k_proj.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        fused *= 1.5
    assert difference(probe(model, model.forward), before) > 0.01
    assert difference(probe(model, forward), probe(model, model.forward)) < 1e-5


def test_hidden_states_are_handed_out(tmp_path):
    from serve_app.engine.request import Request
    from serve_app.engine.step import Capture, Scheduled, build_batch
    from serve_app.models.decoders.fused_decoder import FusedForward
    from serve_app.sampling_params import SamplingParams

    model, forward = build(tiny.write_checkpoint(tmp_path, "qwen3"))
    other = FusedForward(decoder_parts.read_model(model, lambda: probe(model, model.forward)))
    states = []
    for run in (forward, other):
        request = Request("x", [5, 6, 7], 3, SamplingParams(), root=b"", blocks=[1])
        batch = build_batch([Scheduled(request, 0, 3, 0)], model.kv_shape.allocate(2, "cpu"))
        batch.capture = Capture((0, 2))
        with torch.inference_mode():
            assert run(batch).shape == (0, 256)
        states.append(batch.capture.states)
    torch.testing.assert_close(*states)


def test_float16_models_are_taken_as_well(tmp_path):
    """Loading turns float16 into bfloat16 on CPUs only."""
    from serve_app.models.loading import optimise

    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama"))
    model.module.half()
    model.dtype, model.kv_shape = torch.float16, dataclasses.replace(model.kv_shape, dtype=torch.float16)
    assert optimise.optimise(model)["fused_decoder"]


def test_what_a_gpu_lacks_is_said_or_replaced(tmp_path, monkeypatch):
    """Compute capabilities as torch reports them for a T4 and an A100, neither of which is here."""
    from serve_app.models.load import _dtype, load_causal_lm
    from serve_app.models.loading.folder import UnsupportedModel

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert _dtype("auto", {"dtype": "bfloat16"}, "cuda") is torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert _dtype("auto", {"dtype": "bfloat16"}, "cuda") is torch.bfloat16
    path = tiny.write_checkpoint(tmp_path, "llama")
    with pytest.raises(UnsupportedModel, match=r"8\.0.*kv_cache_dtype: auto"):
        load_causal_lm(path, device="cuda", kv_cache_dtype="fp8")


def test_a_pass_that_fails_leaves_the_models_own(tmp_path, monkeypatch):
    from serve_app.models.loading import optimise

    def fails(self, batch):
        raise TypeError("out of resource: shared memory")

    monkeypatch.setattr(fused_decoder.FusedForward, "__call__", fails)
    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama"))
    own = model.forward
    assert "out of resource" in optimise.optimise(model)["transformers_forward"]
    assert model.forward is own and probe(model, own).isfinite().all()


def test_experts_keep_transformers_forward_by_name(tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "qwen3_moe"))
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    for options, reason in (
        ({"fp8": True, "plug": None}, "float8"),
        ({"fp8": False, "plug": lambda weight, linear: linear}, "adapters"),
        ({"fp8": False, "plug": None}, "not used on this device"),
    ):
        assert reason in device.obstacle(parts, **options)
