"""An EAGLE-3 head, and a draft model, beside a model that several ranks divide: they draft what they draft beside one
process, and the answers are those of ``generate``."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from serve_app.engine.kv_io.transfer import LoadedPiece, StoredPrefix
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.speculate import Speculation
from serve_app.engine.step import Capture, Scheduled, build_batch
from serve_app.models.heads.eagle import attach_head
from serve_app.worker.drafting import model_drafter
from tests import tiny
from tests.models.heads.written import write_head
from tests.parallel.groups import chunks_of, divided, layers_of, read_by, spec_of
from tests.parallel.test_divided import NEW_TOKENS, generate, prompts

pytestmark = pytest.mark.slow
LAYERS = {"eagle_aux_hidden_state_layer_ids": [2, 0, 1]}
# Family, ranks that divide layers, stages; how rows go to whole experts. With two stages the last has the third layer,
# with three each has one. Llama runs on the fused layers where ranks divide layers alone.
DIVISIONS = [
    ("llama", 2, 1, ""), ("llama", 4, 1, ""), ("llama", 1, 2, ""), ("llama", 1, 3, ""), ("llama", 2, 2, ""),
    ("mixtral", 2, 2, ""), ("qwen3_moe", 2, 1, "never"), ("qwen3_moe", 2, 2, "always"), ("mixtral", 2, 1, "always"),
    ("gpt_oss", 2, 1, ""), ("gpt_oss", 1, 2, ""), ("deepseek_v3", 2, 1, ""), ("deepseek_v3", 1, 2, ""),
]  # fmt: skip


class Remembering(EagleProposer):
    """Knows what it has proposed: by request, and how many tokens it had then."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.proposed = {}

    def propose(self, requests, count):
        found = super().propose(requests, count)
        self.proposed |= {(r.id, len(r.tokens)): found[r.id].tokens for r in requests if r.id in found}
        return found


@pytest.fixture(scope="module", params=DIVISIONS, ids=str)
def running(request, tmp_path_factory, one_thread):
    family, tensor, pipeline, way = request.param
    folder = tmp_path_factory.mktemp("model")
    path = tiny.write_checkpoint(folder / family, family)
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(8)]
    # Its K/V heads are as wide as some targets' and narrower than others'.
    head = write_head(folder / "head", edit=lambda t: [t.pop("lm_head.weight")], **LAYERS)
    ways = {"expert_parallel": tensor, "expert_dispatch": way} if way else {}
    with divided(path, tensor, pipeline, **ways) as found:
        found.expected, found.path, found.whole = expected, path, tiny.load(path)
        found.heads = {id(model): attach_head(model, head) for model in (found.model, found.whole)}
        yield found
        assert found.lost == []


def engine_of(running, model, **options):
    engine = tiny.make_engine(model, num_blocks=options.pop("num_blocks", 100), **options)
    head = running.heads[id(model)]
    proposer = Remembering(head, engine.runner.kv, engine.scheduler.blocks, spare=2)
    engine.runner.observer = proposer
    engine.speculation = Speculation([proposer], VerifyEverything(3), vocab_size=256)
    return engine, proposer


def test_states_and_cache_are_those_of_one_process(running):
    assert running.model.kv_shape.layout == running.whole.kv_shape.layout
    rng = random.Random(3)
    ids = [rng.randrange(3, 256) for _ in range(40)]
    found = []
    for model in (running.model, running.whole):
        request = tiny.make_request("x", ids)
        request.blocks = [3, 1]
        with torch.inference_mode():
            batch = build_batch([Scheduled(request, 0, 40, 1)], model.kv_shape.allocate(6, "cpu"))
            batch.capture = Capture((2, 0, 1))
            logits = model.forward(batch)
        found.append((batch.capture.states, logits))
    torch.testing.assert_close(*(states for states, _ in found), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*(logits for _, logits in found), atol=1e-3, rtol=1e-3)


def test_it_drafts_what_it_drafts_beside_one_process(running):
    drafts = []
    for model in (running.model, running.whole):
        engine, proposer = engine_of(running, model)
        assert generate(engine, prompts(8)) == running.expected
        assert proposer._unread == {}
        drafts.append(proposer.proposed)
    both = drafts[0].keys() & drafts[1].keys()
    # A step that takes a draft as well leaves a position out.
    assert len(both) > 0.8 * len(drafts[1])
    # A chain may end with its block, in whichever step that is.
    assert all(all(a == b for a, b in zip(*(d[key] for d in drafts), strict=False)) for key in both)


def test_chunks_preemption_and_prefix_hits(running):
    engine, _ = engine_of(running, running.model, max_batch_tokens=23)
    assert generate(engine, prompts(8)) == running.expected == generate(engine, prompts(8))
    assert engine.stats.cached_tokens > 0
    engine, proposer = engine_of(running, running.model, num_blocks=9)
    assert generate(engine, prompts(8)) == running.expected
    assert engine.scheduler.preemptions > 0 and proposer.proposed


def test_who_leaves_takes_nothing_along(running):
    """While steps with its tokens are under way."""
    engine, proposer = engine_of(running, running.model)
    for index, prompt in enumerate(prompts(8)):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS))
    found = {}
    for _ in range(4):
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    for index in (0, 3, 6):
        engine.abort(str(index))
    for _ in range(400):
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert not engine.has_work and proposer._unread == {}
    for index in (1, 2, 4, 5, 7):
        assert found[str(index)] == running.expected[index]
    engine.scheduler.blocks.check()


def test_its_cache_travels_with_the_model_s(running):
    prompt, right = max(zip(prompts(8), running.expected, strict=True), key=lambda pair: len(pair[0]))
    payloads = {id(model): computed(running, model, prompt[:-1]) for model in (running.model, running.whole)}
    layers = [layers_of(running.model, payload, len(prompt) - 1) for payload in payloads.values()]
    for ours, theirs in zip(*layers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert all(layer[-1].abs().sum() > 0 for layer in layers)
    for giving, taking in ((running.model, running.whole), (running.whole, running.model)):
        engine, proposer = engine_of(running, taking)
        prefix = StoredPrefix([LoadedPiece(0, len(prompt) - 1, torch.from_numpy(payloads[id(giving)]))])
        engine.add(tiny.make_request("take", prompt, max_tokens=NEW_TOKENS), read_by(taking, prefix))
        assert tiny.run_all(engine)["take"] == right
        assert engine.stats.cached_tokens == len(prompt) - 1 and proposer.proposed


def computed(running, model, prompt: list[int]) -> np.ndarray:
    """A prompt's K/V, the head's among them, as the pool has them."""
    [(_, payload)] = chunks_of(model, engine_of(running, model)[0], prompt)
    return payload


@pytest.mark.parametrize("same", [True, False], ids=["perfect draft", "useless draft"])
def test_a_draft_model_beside_the_ranks(running, tmp_path, same):
    draft = running.path if same else tiny.write_checkpoint(tmp_path / "draft", "qwen2", seed=3)
    spec = spec_of(running.path, draft_tokens=4, max_batch_tokens=512, max_num_seqs=8)
    drafter = model_drafter(running.model, draft, spec)
    engine = tiny.make_engine(running.model, num_blocks=100)
    engine.speculation = Speculation([drafter.plug_in(engine)], VerifyEverything(4), vocab_size=256)
    assert generate(engine, prompts(8)) == running.expected
    rate = engine.speculation.stats()["acceptance_rate"]
    assert rate > 0.95 if same else rate < 0.5
