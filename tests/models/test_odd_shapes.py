"""Shapes off the beaten track: the engine's pass and the fused decoder give transformers' logits whatever the sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from serve_app.models import attention
from serve_app.models.loading.check import compare
from serve_app.models.loading.miniature import Sizes
from tests import tiny


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Any, Any, Sizes]:
    """A class, its configuration and the sizes to which it is scaled."""
    model_class, config = draw(
        st.sampled_from(
            [(LlamaForCausalLM, LlamaConfig), (MistralForCausalLM, MistralConfig), (Qwen3ForCausalLM, Qwen3Config)]
        )
    )
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5]))
    heads = kv_heads * group
    fields: dict[str, Any] = {
        "num_attention_heads": 32, "num_key_value_heads": 1 if kv_heads == 1 else 32 if group == 1 else 8,
        "head_dim": 128, "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip
    if model_class is LlamaForCausalLM:
        fields |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    if model_class is Qwen3ForCausalLM:
        fields |= {"attention_bias": draw(st.booleans())}
    if model_class is MistralForCausalLM:
        fields |= {"sliding_window": 4096}
    sizes = Sizes(
        layers=draw(st.sampled_from([1, 2])), hidden=heads * draw(st.sampled_from([3, 14, 26])), heads=heads,
        kv_heads=kv_heads, head_dim=draw(st.sampled_from([2, 6, 10, 22, 80])), inner=draw(st.sampled_from([1, 33, 96])),
        vocab=draw(st.sampled_from([10, 257, 1001])), window=draw(st.sampled_from([1, 2, 31, 32, 33, 500])),
        context=160,
    )  # fmt: skip
    return model_class, config(**fields), sizes


def agrees(model_class: Any, config: Any, sizes: Sizes, seed: int, threads: int) -> None:
    attention.register()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        verdict = compare(model_class, config, sizes, seed)
    finally:
        torch.set_num_threads(before)
    assert verdict.differs == "", verdict
    # The fused decoder may decline a shape; it must not differ.
    assert "differs" not in verdict.fused_differs and "fails" not in verdict.fused_differs, verdict


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(shape=shapes(), seed=st.integers(0, 9), threads=st.sampled_from([1, 2, 3]))
def test_odd_shapes_agree(shape: tuple[Any, Any, Sizes], seed: int, threads: int) -> None:
    agrees(*shape, seed, threads)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 999), threads=st.sampled_from([1, 2, 3, 5]))
def test_many_odd_shapes_agree(shape: tuple[Any, Any, Sizes], seed: int, threads: int) -> None:
    agrees(*shape, seed, threads)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_of_260_000(tied: bool) -> None:
    sizes = Sizes(layers=1, hidden=32, vocab=260_000, context=160)
    agrees(LlamaForCausalLM, LlamaConfig(tie_word_embeddings=tied, head_dim=128), sizes, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 31, 33, 64, 256])
def test_batches_of_up_to_256(tmp_path, count: int) -> None:
    """Prompts around every border of blocks and chunks, all at once and one after the other."""
    path = tiny.write_checkpoint(tmp_path, "qwen3")
    model = tiny.load(path, optimise=True)
    rng = random.Random(count)
    prompts = [[rng.randrange(3, 256) for _ in range(rng.choice([1, 31, 32, 33, 63, 64, 65]))] for _ in range(count)]
    wanted = []
    for prompt in prompts:
        engine = tiny.make_engine(model)
        engine.add(tiny.make_request("x", prompt, max_tokens=4, ignore_eos=True))
        wanted.append(tiny.run_all(engine)["x"])
    engine = tiny.make_engine(model, num_blocks=1100, max_num_seqs=256, max_batch_tokens=97)
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=4, ignore_eos=True))
    got = tiny.run_all(engine)
    assert [got[str(i)] for i in range(count)] == wanted
