"""Embeddings given for some of a prompt's tokens: every forward path takes them as transformers' ``inputs_embeds``."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from serve_app.engine.request import EmbeddedSpan
from serve_app.engine.step import Scheduled, build_batch
from serve_app.kernels.decoder import decoder_library
from serve_app.kernels.reference.operators import TORCH
from serve_app.models.decoders import decoder_parts
from serve_app.models.decoders.device import DeviceForward
from serve_app.models.decoders.fused_decoder import FusedForward
from serve_app.models.loading.compare import difference, probe
from tests import sight, tiny
from tests.variants import some

PLACEHOLDER = 7
SPANS = [(3, 20), (40, 37), (77, 1)]
NEW_TOKENS = 12
needs_bf16_dot = pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")


def spans(hidden: int, seed: int = 0) -> list[EmbeddedSpan]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(count, hidden, generator=generator) * 0.5 for _, count in SPANS]
    return [
        EmbeddedSpan(start, count, b"%d.%d" % (seed, start), lambda given=given: given)
        for (start, count), given in zip(SPANS, values, strict=True)
    ]


def prompt(length: int, seed: int = 5) -> list[int]:
    tokens = [random.Random(seed).randrange(8, 256) for _ in range(length)]
    for start, count in SPANS:
        tokens[start : start + count] = [PLACEHOLDER] * len(tokens[start : start + count])
    return tokens


def inputs_embeds(model: torch.nn.Module, tokens: list[int], given: list[EmbeddedSpan]) -> torch.Tensor:
    embedded = model.get_input_embeddings()(torch.tensor([tokens])).clone()
    for span in given:
        embedded[0, span.start : span.end] = span.read().to(embedded.dtype)
    return embedded


@pytest.mark.parametrize(
    ("family", "optimise"),
    some(
        [("llama", False), ("llama", True), ("gemma2", False), ("gemma2", True), ("qwen3", True)],
        ("llama", False),
        ("gemma2", True),
        names=2,
    ),
)
def test_tokens_equal_generate_with_inputs_embeds(family, optimise, tmp_path):
    path = tiny.write_checkpoint(tmp_path, family)
    model, reference = tiny.load(path, optimise=optimise), tiny.load_reference(path)
    reference.generation_config.eos_token_id = None
    # The last token is an embedded one.
    tokens, plain = prompt(78), prompt(60, seed=9)
    # Chunks of 24 cut through the spans; others without embeddings stand beside them.
    engine = tiny.make_engine(model, num_blocks=100, max_batch_tokens=24)
    wanted = {}
    for seed in (1, 2):
        request = tiny.make_request(str(seed), tokens, max_tokens=NEW_TOKENS, ignore_eos=True)
        request.embedded = spans(64, seed)
        engine.add(request)
        embedded = inputs_embeds(reference, tokens, request.embedded)
        with torch.inference_mode():
            out = reference.generate(
                inputs_embeds=embedded, attention_mask=torch.ones(1, len(tokens)), max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )  # fmt: skip
        wanted[str(seed)] = out[0].tolist()
    engine.add(tiny.make_request("plain", plain, max_tokens=NEW_TOKENS, ignore_eos=True))
    wanted["plain"] = tiny.reference_tokens(reference, plain, NEW_TOKENS)
    assert wanted["1"] != wanted["2"]
    assert tiny.run_all(engine) == wanted


def test_the_prefix_cache_tells_contents_apart(tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama"), optimise=True)

    def run(engine, seed):
        request = tiny.make_request(f"r{seed}", prompt(90), max_tokens=4, ignore_eos=True)
        request.embedded = spans(64, seed)
        engine.add(request)
        return tiny.run_all(engine)[request.id], request.cached

    engine = tiny.make_engine(model)
    first, cached = run(engine, 1)
    assert cached == 0
    again, cached = run(engine, 1)
    assert again == first and cached == 64
    other, cached = run(engine, 2)
    assert cached == 0 and other == run(tiny.make_engine(model), 2)[0]


def batch_of(model, tokens: list[int], given: list[EmbeddedSpan]):
    request = tiny.make_request("x", tokens)
    request.embedded, request.blocks = given, list(range(1, 1 + -(-len(tokens) // 32)))
    kv = model.kv_shape.allocate(len(request.blocks) + 1, "cpu")
    return build_batch([Scheduled(request, 0, len(tokens), len(tokens))], kv)


@needs_bf16_dot
def test_the_cpp_pass_takes_them(tmp_path):
    path = tiny.write_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=192, head_dim=32)
    exact, own = tiny.load(path, dtype="float32"), tiny.load(path, dtype="bfloat16")
    fast = tiny.load(path, dtype="bfloat16", optimise=True)
    assert fast.report["fused_decoder"].startswith("C++ decoder")
    tokens, given = prompt(90), spans(128)
    with torch.inference_mode():
        truth, theirs, ours = (m.forward(batch_of(m, tokens, given)).float() for m in (exact, own, fast))
        without = fast.forward(batch_of(fast, tokens, []))
    assert difference(ours, truth) < 1.3 * difference(theirs, truth) < 0.05
    assert difference(without, truth) > 0.3
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="embeddings of 64 for a model of 128"),
    ):
        fast.forward(batch_of(fast, tokens, spans(64)))


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def turning(request, tmp_path):
    """A model whose positions are three numbers, and a text of 90 tokens with pictures; Qwen3-VL's enter the first
    three layers."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2, "head_dim": 32}
    path = sight.write(tmp_path / request.param, request.param, **sizes)
    every = spans(128 * (3 if request.param == "qwen3_vl" else 1))
    return path, prompt(90), [replace(s, grid=grid) for s, grid in zip(every, [(4, 5), (37, 1), (1, 1)], strict=True)]


@needs_bf16_dot
def test_the_cpp_pass_turns_rows_by_three_positions(turning):
    path, tokens, given = turning
    exact, own = tiny.load(path, dtype="float32"), tiny.load(path, dtype="bfloat16")
    fast = tiny.load(path, dtype="bfloat16", optimise=True)
    assert fast.report["fused_decoder"].startswith("C++ decoder")
    with torch.inference_mode():
        truth, theirs, ours = (m.forward(batch_of(m, tokens, given)).float() for m in (exact, own, fast))
        without = fast.forward(batch_of(fast, tokens, [replace(span, grid=None) for span in given]))
    assert difference(ours, truth) < 1.3 * difference(theirs, truth) < 0.05
    assert difference(without, truth) > 0.1
    if given[0].read().shape[1] > 128:
        with torch.inference_mode():
            first = [replace(span, read=lambda s=span: s.read()[:, :128]) for span in given]
            assert difference(fast.forward(batch_of(fast, tokens, first)), truth) > 0.1


def test_fused_layers_turn_rows_by_three_positions(turning):
    path, tokens, given = turning
    model = tiny.load(path)
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    with torch.inference_mode():
        wanted = model.forward(batch_of(model, tokens, given))
        for forward in (DeviceForward(parts, TORCH, 256), FusedForward(parts)):
            got = forward(batch_of(model, tokens, given))
            torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


def test_the_layers_for_gpus_take_them(tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "qwen3"))
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    forward = DeviceForward(parts, TORCH, 256)
    tokens, given = prompt(90), spans(64)
    with torch.inference_mode():
        got, wanted = (run(batch_of(model, tokens, given)) for run in (forward, model.forward))
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
