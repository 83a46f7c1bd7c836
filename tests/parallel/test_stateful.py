"""Models whose layers keep states, on several ranks: the same tokens as transformers' ``generate``."""

from __future__ import annotations

import json

import pytest
import transformers

from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.speculate import Speculation
from serve_app.planning.held import Held
from serve_app.planning.ranks import Split, divide
from serve_app.planning.source import plan_model
from serve_app.planning.tensors import read_headers
from tests import tiny
from tests.parallel.groups import computed, divided, read_by
from tests.parity.test_stateful import FAMILIES, NEW_TOKENS, Guesses, generate, prompts
from tests.variants import some

# Family, ranks that divide layers, stages that divide the model, whole experts.
DIVISIONS = [
    (family, *ranks, False)
    for family in (
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "KimiLinearForCausalLM",
        "OlmoHybridForCausalLM",
        "JambaForCausalLM",
        "Lfm2ForCausalLM",
        "BambaForCausalLM",
    )
    for ranks in ((2, 1), (1, 2), (2, 2))
]
DIVISIONS += [
    ("Qwen3NextForCausalLM", 2, 1, True),
    ("Qwen3NextForCausalLM", 4, 1, False),
    ("MambaForCausalLM", 1, 2, False),
    *(
        (family, *ranks, True)
        for family in ("Qwen3_5MoeForCausalLM", "GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM")
        for ranks in ((2, 1), (2, 2))
    ),
    ("JambaForCausalLM", 2, 1, True),
    ("NemotronHForCausalLM", 2, 1, True),
]


@pytest.fixture(scope="module", params=some(DIVISIONS, ("Qwen3NextForCausalLM", 2, 2, False)), ids=str)
def running(request, tmp_path_factory, one_thread):
    family, tensor, pipeline, whole = request.param
    path = tiny.write_small(tmp_path_factory.mktemp("model"), getattr(transformers, family), **FAMILIES[family])
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(8)]
    with divided(path, tensor, pipeline, expert_parallel=tensor if whole else 1) as found:
        assert found.model.kv_shape.states.parts
        found.expected, found.path = expected, path
        yield found
        assert found.lost == []


def test_chunks_preemption_and_prefix_hits(running):
    engine = tiny.make_engine(running.model, num_blocks=100, max_batch_tokens=23)
    assert generate(engine, prompts(8)) == running.expected == generate(engine, prompts(8))
    assert engine.stats.cached_tokens > 0
    if running.ranks.group.place.pipeline > 1:
        assert engine.stats.under_way > engine.stats.steps
    # The longest request takes six, and one is nobody's.
    engine = tiny.make_engine(running.model, num_blocks=8, kept=0)
    assert generate(engine, prompts(8)) == running.expected
    assert engine.scheduler.preemptions > 0


def test_drafts_are_verified_by_all_ranks(running):
    truth = {tuple(prompt): tokens for prompt, tokens in zip(prompts(8), running.expected, strict=True)}
    speculation = Speculation(Guesses(truth), VerifyEverything(5))
    engine = tiny.make_engine(running.model, num_blocks=100, speculation=speculation)
    assert generate(engine, prompts(8)) == running.expected
    stats = speculation.stats()
    assert stats["proposed_tokens"] > stats["accepted_tokens"] > 0


def test_states_are_handed_over_between_divisions(running):
    """What ranks have computed goes on in one process, and the other way round, through the same chunks."""
    whole = tiny.load(running.path)
    mine, one = running.model.kv_shape, whole.kv_shape
    assert (mine.layout, mine.state_layout) == (one.layout, one.state_layout)
    prompt, right = max(zip(prompts(8), running.expected, strict=True), key=lambda pair: len(pair[0]))
    for giving, taking in ((running.model, whole), (whole, running.model), (running.model, running.model)):
        prefix = computed(giving, prompt[:-1])
        assert prefix.state.numel() == taking.kv_shape.states.bytes
        engine = tiny.make_engine(taking, num_blocks=40)
        engine.add(tiny.make_request("take", prompt, max_tokens=NEW_TOKENS), read_by(taking, prefix))
        assert tiny.run_all(engine)["take"] == right
        assert engine.stats.cached_tokens == len(prompt) - 1


def test_each_rank_keeps_the_states_of_its_stage(running):
    parts = running.model.kv_shape.parts
    place = running.ranks.group.place
    held = [sum(part.shape.states.bytes for part in parts[rank :: place.tensor]) for rank in range(place.tensor)]
    assert held == [running.model.kv_shape.states.bytes] * place.tensor
    assert running.model.kv_shape.slot_bytes == max(part.shape.states.bytes for part in parts)


def test_as_much_lies_on_a_rank_as_is_planned(running):
    place = running.ranks.group.place
    config = json.loads((running.path / "config.json").read_text())
    planned = plan_model("tiny", config, read_headers(running.path), item=4)
    loaded = plan_model("tiny", config, read_headers(running.path), item=4, held=Held("float32"))
    assert loaded.state_bytes == running.model.kv_shape.states.bytes
    split = Split(place.tensor, place.pipeline, place.whole_experts)
    held = [running.model.report["held_bytes"], *(state["held_bytes"] for state in running.ranks.states()[1:])]
    stages = divide(planned, split, batch_tokens=1, sampled=1)
    for stage, rank in enumerate(stages):
        fullest = max(held[stage * place.tensor : (stage + 1) * place.tensor])
        assert rank.weight_bytes == pytest.approx(fullest, rel=0.02)
    for rank, part in enumerate(running.model.kv_shape.parts):
        stage = stages[rank // place.tensor]
        caches = loaded.caches[stage.first : stage.last]
        assert sum(cache.rank_bytes(place.tensor) for cache in caches) == part.shape.token_bytes
        assert sum(cache.state for cache in caches) == part.shape.slot_bytes
