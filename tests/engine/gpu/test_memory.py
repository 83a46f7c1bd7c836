"""The K/V cache's share of a GPU."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import Qwen3NextForCausalLM

from serve_app.engine.gpu.memory import RESERVE, Budget, NotEnoughMemory, draw_all, largest_batch, longest_batch
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


@pytest.mark.parametrize("family", ["glm 5", "glm 5.3 flash"])
def test_choosing_keys_takes_what_a_plan_says(family, one_thread, tmp_path, monkeypatch):
    """Counted operator by operator, where parts are as large as they are and smaller: rows of a text that is much
    longer than what is chosen, a row each of two such texts, and texts of which all tokens are chosen.
    """
    from benchmarks.engine import planned as compared
    from serve_app.kernels import chosen
    from serve_app.models import indexed
    from serve_app.planning import choosing
    from serve_app.planning.ranks import Split, bound_on_cpus, cpu_logit_bytes

    assert (choosing.SCORES, choosing.GATHERED) == (indexed.SCORES, chosen.GATHERED)
    if family in compared.SEEING:  # where layers have no states, which take more
        *names, text, sees = compared.SEEING[family]
        own = (*names, text | {"layer_types": 3 * ["indexed_attention"]}, sees)
        monkeypatch.setitem(compared.SEEING, family, own)
    folder = compared.write(tmp_path, family)
    loaded = tiny.load(folder, dtype="bfloat16")
    model = compared.planned(folder, "bfloat16", "none").model
    rows, most, end = compared.ROWS, 64, compared.COMMON["max_position_embeddings"]
    steps = [[(end - rows, rows)], [(end - 1, 1)] * 2, [(0, most)] * (rows // most)]
    for scores, gathered in ((choosing.SCORES, choosing.GATHERED), (1 << 20, 1 << 18), (1 << 18, 1 << 22)):
        for module in (choosing, indexed):
            monkeypatch.setattr(module, "SCORES", scores)
        for module in (choosing, chosen):
            monkeypatch.setattr(module, "GATHERED", gathered)
        shares = []
        for texts in steps:
            each = sum(count for _, count in texts)
            bound = bound_on_cpus(model, Split(), each, len(texts)) + cpu_logit_bytes(model, Split(), len(texts))
            shares.append(compared.peak_bytes(loaded, texts) / bound)
        assert max(shares) <= 1, (scores, gathered, shares)
        # Of rows of any texts.
        assert max(shares[0], shares[2]) > 0.5 and shares[1] > 0.5, (scores, gathered, shares)


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


@pytest.mark.parametrize("family", ["GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM"])
def test_the_longest_texts_choose_among_all_of_their_keys(tmp_path, family, monkeypatch):
    """One row of each of several, and many rows of one, which touch nobody's block and slot."""
    from serve_app.models import indexed

    model = tiny.load(tiny.write_small(tmp_path, getattr(transformers, family)))
    assert model.chooses
    cut, seen = indexed.cut, []

    def watched(*given, **options):
        for piece in cut(*given, **options):
            seen.append((len(piece.requests), piece.rows.count, piece.lengths, piece.chooses))
            yield piece

    monkeypatch.setattr(indexed, "cut", watched)
    kv = model.kv_shape.allocate(3, "cpu")
    with torch.inference_mode():
        model.forward(longest_batch(kv, 3, 1, 700))
        model.forward(longest_batch(kv, 1, 40, 900))
    assert (3, 1, [700] * 3, True) in seen and (1, 40, [900], True) in seen
    assert not any(bool(plane[:, :, 1:].any()) for plane in kv.planes)
    assert not any(bool(part[1:].any()) for part in kv.states)


def test_the_largest_batch_writes_states_to_nobodys_slot(tmp_path):
    model = tiny.load(tiny.write_small(tmp_path, Qwen3NextForCausalLM))
    kv = model.kv_shape.allocate(3, "cpu")
    with torch.inference_mode():
        model.forward(largest_batch(kv, 70, 8, 40))
    assert all(bool(part[0].any()) and not bool(part[1:].any()) for part in kv.states)
