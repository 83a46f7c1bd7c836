"""From byte budgets to blocks, and an engine put together the way the workers do it."""

from __future__ import annotations

import pytest
import torch

from serve_app.engine.build import EngineLimits, build_engine, num_blocks
from serve_app.engine.kv_cache import KVShape
from tests import tiny


def test_block_bytes():
    # K and V, 32 tokens, of every layer.
    assert KVShape.uniform(3, 2, 16, torch.bfloat16).block_bytes == 3 * 2 * 2 * 32 * 16 * 2


@pytest.mark.parametrize(
    ("limits", "blocks"),
    [
        (EngineLimits(kv_cache_bytes=1000, max_model_len=4096), 10),
        (EngineLimits(kv_cache_bytes=1, max_model_len=4096), 2),
        # Without a budget: 1024 tokens for each sequence, one full context at least, and the block never handed out.
        (EngineLimits(max_num_seqs=4, max_model_len=4096), 4 * 32 + 1),
        (EngineLimits(max_num_seqs=1, max_model_len=4096), 128 + 1),
        (EngineLimits(max_num_seqs=4, max_model_len=100), 4 * 4 + 1),
    ],
)
def test_num_blocks(limits, blocks):
    assert num_blocks(limits, 100) == blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.load(tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama"))


def test_the_engine_keeps_within_its_limits(model):
    limits = EngineLimits(max_batch_tokens=40, max_num_seqs=3, max_model_len=128)
    engine = build_engine(model, limits)
    scheduler = engine.scheduler
    assert (scheduler.max_batch_tokens, scheduler.max_num_seqs, scheduler.max_model_len) == (40, 3, 128)
    assert scheduler.eos_token_ids == model.eos_token_ids == frozenset({2})
    assert engine.runner.kv.num_blocks == scheduler.blocks.num_blocks == 13
    for index in range(5):
        engine.add(tiny.make_request(str(index), [5 + index] * 50, ignore_eos=True))
    assert [len(t) for t in tiny.run_all(engine).values()] == [16] * 5


@pytest.mark.parametrize(
    ("limits", "context"),
    [
        (EngineLimits(max_model_len=300), 300),
        (EngineLimits(max_model_len=10**6, kv_cache_bytes=10**8), 1024),  # the model's
        (EngineLimits(max_model_len=300, kv_cache_bytes=24576 * 4), 3 * 32),  # the cache's
    ],
)
def test_the_context_is_what_model_limits_and_cache_allow(model, limits, context):
    assert model.kv_shape.block_bytes == 24576
    assert build_engine(model, limits).scheduler.max_model_len == context


def test_wire_may_plug_features_in(model):
    seen = []
    engine = build_engine(model, EngineLimits(max_num_seqs=1, max_model_len=64), seen.append)
    assert seen == [engine]


def test_a_token_that_the_model_does_not_have_is_refused_alone(model):
    """Its tokenizer may have more of them, and a step with one of them ends all requests in it."""
    engine = build_engine(model, EngineLimits(max_model_len=128))
    engine.add(tiny.make_request("known", [5, 255], ignore_eos=True))
    for index, tokens in enumerate(([5, 256], [300] * 40, [-1, 5])):
        with pytest.raises(ValueError, match="unknown to the model, which has 256"):
            engine.add(tiny.make_request(str(index), tokens))
    request = tiny.make_request("asked", [5])
    request.asked = (7, 1000)
    with pytest.raises(ValueError, match="token 1000"):
        engine.add(request)
    assert [len(tokens) for tokens in tiny.run_all(engine).values()] == [16]
