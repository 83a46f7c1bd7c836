"""The engine's one truth: greedy tokens equal transformers' ``generate`` on the same weights, whatever else is going
on.
"""

from __future__ import annotations

import random

import pytest

from serve_app.engine.blocks import BlockPool
from serve_app.engine.kv_io.transfer import ChunkExporter, LoadedPiece, StoredPrefix
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.recent import RecentProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.kv.chunk import ChunkMeta
from serve_app.models.heads.eagle import attach_head
from tests import tiny
from tests.models.heads.written import write_head
from tests.variants import some

NEW_TOKENS = 24


@pytest.fixture(scope="module", params=some(tiny.FAMILIES, "gemma2"))
def family(request, tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)
    return tiny.load(path), tiny.load_reference(path), path


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def expected(family):
    _, reference, _ = family
    return [tiny.reference_tokens(reference, p, NEW_TOKENS) for p in prompts(16)]


def generate(engine, batch, spare=0, **sampling):
    for index, prompt in enumerate(batch):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS, **sampling))
    outputs = tiny.run_all(engine)
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == spare
    return [outputs[str(i)] for i in range(len(batch))]


def test_alone(family, expected):
    for prompt, tokens in zip(prompts(6), expected[:6], strict=True):
        assert generate(tiny.make_engine(family[0]), [prompt]) == [tokens]


def test_mixed_batch_of_16(family, expected):
    assert generate(tiny.make_engine(family[0], num_blocks=200), prompts(16)) == expected


def test_chunked_prefill(family, expected):
    assert generate(tiny.make_engine(family[0], num_blocks=200, max_batch_tokens=23), prompts(16)) == expected


def test_preemption(family, expected):
    engine = tiny.make_engine(family[0], num_blocks=14)
    assert generate(engine, prompts(16)) == expected
    assert engine.scheduler.preemptions > 0


def test_prefix_cache(family, expected):
    engine = tiny.make_engine(family[0], num_blocks=200)
    assert generate(engine, prompts(16)) == expected
    assert generate(engine, prompts(16)) == expected
    assert engine.stats.cached_tokens > 0


SAMPLED = {"temperature": 0.9, "seed": 4, "top_p": 0.95}


@pytest.mark.slow
def test_seeded_sampling_in_float32(family):
    """Whatever the steps were: the promise of docs/api.md."""
    batch = prompts(8)
    alone = [generate(tiny.make_engine(family[0]), [prompt], **SAMPLED)[0] for prompt in batch]
    for options in ({"num_blocks": 200}, {"num_blocks": 200, "max_batch_tokens": 23}, {"num_blocks": 14}):
        assert generate(tiny.make_engine(family[0], **options), batch, **SAMPLED) == alone, options


@pytest.mark.parametrize("optimise", some([False, True], True))
def test_seeded_sampling_in_bfloat16(family, optimise):
    """The same in the same steps; other steps may change a token, which is not promised."""
    model, batch = tiny.load(family[2], dtype="bfloat16", optimise=optimise), prompts(4)
    for options in ({"num_blocks": 200}, {"num_blocks": 200, "max_batch_tokens": 23}):
        first, second = (generate(tiny.make_engine(model, **options), batch, **SAMPLED) for _ in range(2))
        assert first == second


def test_eagle_head(family, expected, tmp_path):
    """Through chunks, preemption and the prefix cache, and for sampled requests as well."""
    _, _, path = family
    model, plain = (tiny.load(path, optimise=True) for _ in range(2))
    head = attach_head(model, write_head(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 2]))
    sampled = {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2}
    drawn = generate(tiny.make_engine(plain, num_blocks=200), prompts(8), **sampled)
    for options in ({"num_blocks": 200}, {"num_blocks": 14, "max_batch_tokens": 70}):
        engine = tiny.make_engine(model, **options)
        proposer = EagleProposer(head, engine.runner.kv, engine.scheduler.blocks, 4)
        engine.runner.observer = proposer
        engine.speculation = Speculation(proposer, VerifyEverything(4))
        assert generate(engine, prompts(8), spare=4) == expected[:8]
        assert generate(engine, prompts(2), spare=4) == expected[:2]
        assert engine.speculation.stats()["drafted_steps"] > 0
        assert generate(engine, prompts(8), spare=4, **sampled) == drawn
        assert options["num_blocks"] > 100 or engine.scheduler.preemptions > 0


@pytest.mark.parametrize("same_weights", [True, False], ids=["perfect-draft", "useless-draft"])
def test_draft_model(family, expected, same_weights, tmp_path):
    model, _, path = family
    draft_path = path if same_weights else tiny.write_checkpoint(tmp_path / "draft", "llama", seed=9)
    engine = tiny.make_engine(model, num_blocks=200, speculation=speculation(draft_path))
    assert generate(engine, prompts(16)) == expected
    stats = engine.speculation.stats()
    assert stats["proposed_tokens"] > 0
    if same_weights:
        assert stats["acceptance_rate"] > 0.9
        assert engine.stats.steps < 16


@pytest.mark.parametrize("always", [True, False], ids=["always", "controlled"])
def test_look_up_and_a_draft_model_together(family, expected, always):
    drafting = speculation(family[2]).proposers
    proposers = [NgramProposer(limit=5), RecentProposer(), *drafting]
    together = Speculation(proposers, VerifyEverything(12) if always else SpeculationController(12))
    engine = tiny.make_engine(family[0], num_blocks=300, speculation=together)
    # Again, when the answers are known to the tenant's look-up.
    for _ in range(2):
        assert generate(engine, prompts(16)) == expected
    found = engine.speculation.stats()["proposers"]
    assert found["ngram"]["asked"] and found["recent"]["asked"]
    assert not always or found["recent"]["accepted_tokens"] > 0


def test_draft_with_preemption_and_chunks(family, expected, tmp_path):
    engine = tiny.make_engine(
        family[0], num_blocks=16, max_batch_tokens=40, speculation=speculation(family[2], blocks=12)
    )
    assert generate(engine, prompts(16)) == expected


def speculation(path, blocks: int = 200) -> Speculation:
    draft = tiny.load(path)
    server = DraftEngine(
        Runner(draft.forward, draft.kv_shape.allocate(blocks, "cpu")), BlockPool(blocks), max_model_len=1024
    )
    return Speculation(DraftProposer(server.propose), VerifyEverything(4))


def test_hand_over_from_prefill_to_decode(family, expected):
    """Prefill publishes chunks, another engine loads them: same tokens, and only the last prompt token is computed
    twice.
    """
    model = family[0]
    rng = random.Random(3)
    # No block, whole blocks, whole chunks, and what is left over of each.
    for length in (1, 2, 33, 256, 258, 520):
        prompt = [rng.randrange(3, 256) for _ in range(length)]
        tokens = tiny.reference_tokens(family[1], prompt, NEW_TOKENS)
        chunks = prefill(model, prompt[:-1])
        assert sum(meta.n_tokens for meta, _ in chunks) == len(prompt) - 1
        engine = tiny.make_engine(model)
        engine.add(tiny.make_request("x", prompt, max_tokens=NEW_TOKENS), stored_prefix(model, chunks))
        steps = []
        while engine.has_work:
            steps += engine.step()
        assert [t for s in steps for t in s.token_ids] == tokens
        assert steps[0].cached == len(prompt) - 1


def prefill(model, prompt: list[int]):
    chunks: list = []
    if not prompt:
        return chunks
    engine = tiny.make_engine(model, max_batch_tokens=100)
    engine.exporter = ChunkExporter(engine.runner.kv, lambda _, meta, data: chunks.append((meta, data())))
    engine.add(tiny.make_request("p", prompt, prefill_only=True), held=0)
    assert tiny.run_all(engine) == {"p": []}
    return chunks


def stored_prefix(model, chunks: list[tuple[ChunkMeta, object]]) -> StoredPrefix | None:
    import torch

    pieces = [LoadedPiece(m.start_token, m.n_tokens, torch.from_numpy(d.copy())) for m, d in chunks]
    return StoredPrefix(pieces) if pieces else None


def test_repetition_penalty_and_stop_ids(family):
    model, reference, _ = family
    for prompt in prompts(4):
        wanted = tiny.reference_tokens(reference, prompt, NEW_TOKENS, repetition_penalty=1.3)
        assert generate(tiny.make_engine(model), [prompt], repetition_penalty=1.3) == [wanted]
        stop = wanted[len(wanted) // 2]
        cut = wanted[: wanted.index(stop) + 1]
        assert generate(tiny.make_engine(model), [prompt], repetition_penalty=1.3, stop_token_ids=(stop,)) == [cut]
