"""On a GPU: the engine as a worker builds it, graphs and overlap included, gives the CPU's greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from serve_app.engine.build import EngineLimits, build_engine, gpu_cache_bytes
from serve_app.engine.gpu.graphs import DecodeGraphs
from serve_app.engine.gpu.overlap import OverlapEngine
from serve_app.models.load import load_causal_lm
from tests import tiny
from tests.engine.gpu.test_graphs import Counted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PICO = Path(__file__).parents[2] / "checkpoints" / "pico-instruct"
NEW_TOKENS = 24


def prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(10, vocab) for _ in range(rng.randrange(1, 150))] for _ in range(16)]


def generate(path: Path, device: str, *, graphs: bool = True, **limits) -> list[list[int]]:
    model = load_causal_lm(path, dtype="float32", device=device)
    engine = build_engine(model, EngineLimits(max_batch_tokens=64, max_model_len=512, **limits))
    if device == "cuda":
        decode = engine.runner.forward
        assert isinstance(engine, OverlapEngine) and isinstance(decode, DecodeGraphs)
        decode._capture = replayed = Counted(decode._capture)
        while graphs and engine.runner.prepare():
            pass
    for index, prompt in enumerate(prompts(min(model.vocab_size, 4000))):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS, ignore_eos=True))
    outputs = tiny.run_all(engine)
    if (
        device == "cuda" and graphs and "fused_decoder" in model.report
    ):  # transformers' own forward may not be capturable
        assert decode.captured and replayed.replays > 0
    return [outputs[str(i)] for i in range(16)]


def test_pico_gives_the_same_tokens_as_on_the_cpu():
    expected = generate(PICO, "cpu")
    assert generate(PICO, "cuda", max_num_seqs=8) == expected
    assert generate(PICO, "cuda", max_num_seqs=8, graphs=False) == expected


@pytest.mark.parametrize("family", list(tiny.FAMILIES | tiny.MIXTURES | tiny.LATENT))
def test_families_give_the_same_tokens_as_on_the_cpu(family, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    assert generate(path, "cuda", max_num_seqs=8) == generate(path, "cpu")


def test_the_kernels_are_used(tmp_path):
    model = load_causal_lm(tiny.write_checkpoint(tmp_path, "llama"), device="cuda")
    assert model.report["fused_decoder"].startswith("fused layers, triton"), model.report


def test_the_cache_takes_what_is_left():
    model = load_causal_lm(PICO, device="cuda")
    limits = EngineLimits(max_batch_tokens=256, max_model_len=512, max_num_seqs=8)
    total = torch.cuda.mem_get_info()[1]
    assert 0.1 * total < gpu_cache_bytes(model, limits, 0.3) < 0.3 * total
    assert model.report["activations_mb"] >= 0


def test_a_capture_that_fails_leaves_the_device_usable():
    from serve_app.engine.gpu.graphs import CudaCapture

    ours = torch.cuda.current_stream()
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        CudaCapture()(lambda: x.sum().item())
    assert torch.cuda.current_stream() == ours
    assert float((x * 2).sum()) == 8
    y = torch.zeros(4, device="cuda")
    replay = CudaCapture()(lambda: y.add_(1))
    replay()
    assert y.tolist() == [1, 1, 1, 1]


def test_no_step_waits_for_the_device(monkeypatch):
    """What launches a step asks the device for nothing: torch raises where something would wait for it."""
    from serve_app.engine.gpu import overlap

    model = load_causal_lm(PICO, device="cuda")
    engine = build_engine(model, EngineLimits(max_batch_tokens=256, max_model_len=512, max_num_seqs=8))
    while engine.runner.prepare():
        pass
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 0},
        {"temperature": 1.0, "top_p": 0.99, "min_p": 0.001, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}},
    ]
    original, strict = overlap.launch, []

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(overlap, "launch", watched)
    for round_number in range(2):  # kernels are compiled in the first
        for index, sampling in enumerate(settings):
            prompt = prompts(4000)[index]
            engine.add(tiny.make_request(f"{round_number}-{index}", prompt, max_tokens=12, ignore_eos=True, **sampling))
        assert all(len(tokens) == 12 for tokens in tiny.run_all(engine).values())
        strict.append(True)


def test_a_float8_cache_gives_what_the_cpu_gives():
    """Codes are rounded alike, sums in another order."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    from serve_app.models.loading.compare import difference, probe

    for options in ({"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}):
        here = load_causal_lm(PICO, dtype="bfloat16", device="cuda", **options)
        there = load_causal_lm(PICO, dtype="bfloat16", **options)
        assert "fused_decoder" in here.report, here.report
        assert difference(probe(here, here.forward).cpu(), probe(there, there.forward)) < 0.05
