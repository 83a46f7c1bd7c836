"""The K/V cache's share of a GPU."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3NextForCausalLM

from serve_app.engine.gpu.memory import RESERVE, Budget, NotEnoughMemory, draw_all, largest_batch
from tests import tiny

GIB = 2**30


def test_the_cache_is_what_the_share_leaves():
    budget = Budget(total=80 * GIB, free=60 * GIB, held=16 * GIB, activations=2 * GIB)
    assert budget.cache_bytes(0.9, GIB) == int(72 * GIB) - 18 * GIB - RESERVE
    # Half a GPU, of which others use the rest.
    assert budget.cache_bytes(0.45, GIB) == int(36 * GIB) - 18 * GIB - RESERVE
    # Pictures are encoded beside steps.
    sees = Budget(total=80 * GIB, free=60 * GIB, held=16 * GIB, activations=2 * GIB, media=3 * GIB)
    assert sees.cache_bytes(0.9, GIB) == budget.cache_bytes(0.9, GIB) - 3 * GIB
    crowded = Budget(total=80 * GIB, free=10 * GIB, held=16 * GIB, activations=2 * GIB)
    assert crowded.cache_bytes(0.9, GIB) == 8 * GIB - RESERVE


def test_too_little_is_refused_with_a_remedy():
    budget = Budget(total=24 * GIB, free=6 * GIB, held=17 * GIB, activations=5 * GIB)
    with pytest.raises(NotEnoughMemory, match="gpu_memory_utilization"):
        budget.cache_bytes(0.9, GIB)
    with pytest.raises(NotEnoughMemory, match="9.00 GiB for pictures and sounds"):
        Budget(total=24 * GIB, free=24 * GIB, held=17 * GIB, activations=GIB, media=9 * GIB).cache_bytes(0.9, GIB)


@pytest.mark.parametrize(("rows", "vocab"), [(8, 1000), (64, 5000)])
def test_drawing_takes_what_a_plan_says(rows, vocab, monkeypatch):
    """Counted on CPU tensors, operator by operator; with parts as small as the vocabulary is."""
    from serve_app.engine import sampling
    from serve_app.models.peak import Living
    from serve_app.planning import ranks

    assert ranks.DRAWN_AT_ONCE == sampling.AT_ONCE
    for module, name in ((ranks, "DRAWN_AT_ONCE"), (sampling, "AT_ONCE")):
        monkeypatch.setattr(module, name, 80_000)
    # In place of a sort there is a kernel on a GPU.
    monkeypatch.setattr(sampling, "_draw_from_all", lambda *_: None)
    logits = torch.randn(rows, vocab).bfloat16()
    with torch.no_grad(), Living([]) as living:
        draw_all(logits)
    planned = ranks.logit_bytes(SimpleNamespace(vocab=vocab), rows)
    assert 0.85 * planned < living.peak + logits.nbytes < 1.02 * planned


def test_the_largest_batch_runs_and_touches_the_trash_block_only(tmp_path):
    model = tiny.load(tiny.write_checkpoint(tmp_path, "llama"))
    kv = model.kv_shape.allocate(3, "cpu")
    batch = largest_batch(kv, 1500, 8, 600)
    assert batch.seq_lens.tolist() == [600, 600, 300]
    with torch.inference_mode():
        logits = model.forward(batch)
        assert logits.shape == (8, model.vocab_size)
        assert draw_all(logits).shape == (8,)
    [plane] = kv.planes
    assert bool(plane[:, :, 0].any()) and not bool(plane[:, :, 1:].any())


def test_the_largest_batch_writes_states_to_nobodys_slot(tmp_path):
    model = tiny.load(tiny.write_small(tmp_path, Qwen3NextForCausalLM))
    kv = model.kv_shape.allocate(3, "cpu")
    with torch.inference_mode():
        model.forward(largest_batch(kv, 70, 8, 40))
    assert all(bool(part[0].any()) and not bool(part[1:].any()) for part in kv.states)
