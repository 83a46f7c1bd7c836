"""Ranks that divide a model in fewer bits answer as one process does with the same ones."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.channel.inbox import TokenInbox
from serve_app.kernels.linear.panels import panel_library
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.parallel.groups import divided
from tests.parallel.test_divided import NEW_TOKENS, generate, prompts
from tests.parallel.workers import working
from tests.variants import some
from tests.worker.world import MemoryPool, call, read

# So that each of two ranks, and for Llama of four, has whole groups of columns.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 128}
MORE = {
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 256},
    "deepseek_v3": EXPERTS | {"num_key_value_heads": 8, "head_dim": 16, "v_head_dim": 32},
}
CASES = [
    (family, *divided_by, quantization)
    for family, divided_by in (
        ("llama", (2, 1, 1)), ("llama", (4, 1, 1)), ("llama", (1, 2, 1)), ("qwen3", (2, 2, 1)), ("gemma2", (2, 1, 1)),
        ("mixtral", (2, 1, 1)), ("mixtral", (2, 1, 2)), ("gpt_oss", (2, 1, 1)), ("qwen2_moe", (2, 1, 1)),
        ("deepseek_v3", (2, 1, 1)),
    )
    for quantization in ("int8", "int4")
]  # fmt: skip
needs_vnni = pytest.mark.skipif(panel_library(quantized=True) is None, reason="needs a compiler and AVX512_VNNI")


def write(folder, family):
    return tiny.write_checkpoint(folder / family, family, **WIDE | MORE.get(family, {}))


@pytest.mark.parametrize("case", some(CASES), ids=str)
def test_greedy_tokens_are_those_of_one_process(tmp_path, one_thread, case):
    family, tensor, pipeline, whole, quantization = case
    path = write(tmp_path, family)
    alone = load_causal_lm(path, dtype="float32", quantization=quantization)
    wanted = generate(tiny.make_engine(alone, num_blocks=100), prompts(6))
    plain = generate(tiny.make_engine(tiny.load(path), num_blocks=100), prompts(6))
    # The tiny Gemma repeats its prompt whatever it is told.
    assert wanted != plain or quantization == "int8" or family == "gemma2"
    with divided(path, tensor, pipeline, expert_parallel=whole, quantization=quantization) as found:
        assert found.model.report["quantization"].startswith(quantization)
        # In chunks, with hits, and preempted.
        for blocks, tokens in ((100, 512), (100, 23), (6, 512)):
            engine = tiny.make_engine(found.model, num_blocks=blocks, max_batch_tokens=tokens)
            assert generate(engine, prompts(6)) == wanted
        assert found.lost == []


@needs_vnni
@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", [("llama", 1), ("gemma2", 1), ("mixtral", 1), ("mixtral", 2)], ids=str)
def test_codes_are_multiplied_as_they_are(tmp_path, one_thread, case, bits):
    """Each rank holds them alone, and gives what one process does up to roundings of bfloat16."""
    family, whole = case
    path, options = write(tmp_path, family), {"dtype": "bfloat16", "quantization": f"int{bits}"}
    alone = load_causal_lm(path, **options)
    want = probe(alone, alone.forward)
    exact = tiny.load(path, dtype="float32")
    cost = difference(want, probe(exact, exact.forward))
    # Of linears alone; beside these there is the embedding.
    linears = sum(p.numel() for n, p in exact.module.named_parameters() if p.ndim > 1 and "embed" not in n)
    embedding = exact.module.get_input_embeddings().weight.numel() * 2
    with divided(path, 2, expert_parallel=whole, **options) as found:
        report = found.model.report
        if family == "llama":
            assert report["fused_decoder"] == "fused torch decoder"
        else:
            assert "quantised" in report["linears"]
        assert report["weight_bytes"] < (linears * (bits / 8 + 0.1) + embedding) / 2 * 1.2
        got = probe(found.model, found.model.forward)
        # A rounding may choose another expert.
        assert difference(got, want) < max(0.02, (1.0 if family == "mixtral" else 0.6) * cost)


@pytest.mark.parametrize("tensor", some([2, 4], 2))
def test_in_float8_ranks_are_as_close_to_the_model_as_one_process_is(tmp_path, one_thread, tensor):
    """Where ranks divide a linear's inputs each rounds its part, with scales of its own for rows and outputs, which are
    finer than those of one process.
    """
    path = write(tmp_path, "llama")
    exact = tiny.load(path, dtype="float32")
    truth = probe(exact, exact.forward)
    alone = load_causal_lm(path, dtype="float32", quantization="fp8")
    error = difference(probe(alone, alone.forward), truth)
    with divided(path, tensor, quantization="fp8", dtype="float32") as found:
        assert found.model.report["fused_decoder"].startswith("fused layers in float8")
        assert 0.3 * error < difference(probe(found.model, found.model.forward), truth) < 1.1 * error
        # In chunks, and preempted.
        wanted = generate(tiny.make_engine(found.model, num_blocks=100), prompts(4))
        assert generate(tiny.make_engine(found.model, num_blocks=6, max_batch_tokens=23), prompts(4)) == wanted
    assert asyncio.run(answers(path, tensor, quantization="fp8")) == wanted


async def answers(path, tensor, pipeline=1, **options) -> list[list[int]]:
    """Of a worker that starts as a deployment starts it."""
    inbox = TokenInbox()
    await inbox.start()
    try:
        async with working(path, MemoryPool(), tensor, pipeline, **options) as work:
            asked = [call(prompt, inbox, max_tokens=NEW_TOKENS, ignore_eos=False) for prompt in prompts(4)]
            return [(await read(inbox, each, lambda each=each: work.generate(each)))[0] for each in asked]
    finally:
        await inbox.aclose()


def test_stages_in_float8_are_refused_before_any_rank_starts(tmp_path):
    with pytest.raises(ValueError, match="fp8 does not go together with 2 stages"):
        asyncio.run(answers(write(tmp_path, "llama"), 1, 2, quantization="fp8"))
