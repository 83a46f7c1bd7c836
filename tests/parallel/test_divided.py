"""Ranks that divide a model answer as transformers' ``generate`` does, whatever the division and whatever goes on."""

from __future__ import annotations

import json
import random

import pytest
import torch

from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.kv.parts import block_bytes
from serve_app.planning.ranks import Split, divide
from serve_app.planning.source import plan_model
from serve_app.planning.tensors import read_headers
from tests import tiny
from tests.parallel.groups import chunks_of, computed, divided, layers_of, read_by, until
from tests.variants import some

NEW_TOKENS = 20
# Family, ranks that divide layers, stages that divide the model. With four ranks each of two K/V heads lies on two.
DIVISIONS = [
    (family, *ranks)
    for family in (
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "phi3",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "gpt_neox",
    )
    for ranks in ((2, 1), (4, 1), (1, 2), (2, 2))
] + [(family, 2, 1) for family in ("qwen2_moe", "glm4_moe", "deepseek_v3")]
DIVISIONS += [("deepseek_v2", 4, 1), ("deepseek_v3", 2, 2)]
# The same with whole experts on each rank.
DIVISIONS += [
    (family, *ranks, True)
    for family in ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v3")
    for ranks in ((2, 1), (2, 2))
]
DIVISIONS += [("qwen3_moe", 4, 1, True)]
# And with rows that travel to them, however few.
DIVISIONS += [
    (family, *ranks, "always")
    for family, ranks in (
        ("mixtral", (2, 1)), ("mixtral", (4, 1)), ("qwen3_moe", (2, 1)), ("qwen3_moe", (4, 1)), ("qwen3_moe", (2, 2)),
        ("gpt_oss", (2, 1)), ("qwen2_moe", (2, 1)), ("glm4_moe", (2, 1)), ("deepseek_v2", (2, 1)),
        ("deepseek_v3", (2, 1)), ("deepseek_v3", (4, 1)), ("deepseek_v3", (2, 2)),
    )
]  # fmt: skip


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module", params=some(DIVISIONS, ("mixtral", 2, 2)), ids=str)
def running(request, tmp_path_factory, one_thread):
    family, tensor, pipeline, *whole = request.param
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / family, family)
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(8)]
    ways = {"expert_parallel": tensor, "expert_dispatch": whole[0] if whole == ["always"] else "never"} if whole else {}
    with divided(path, tensor, pipeline, **ways) as found:
        assert bool(found.model.report.get("expert_dispatch")) == (whole == ["always"])
        found.expected, found.path = expected, path
        yield found
        assert found.lost == []


def generate(engine, batch, **sampling):
    sampling.setdefault("max_tokens", NEW_TOKENS)
    for index, prompt in enumerate(batch):
        engine.add(tiny.make_request(str(index), prompt, **sampling))
    outputs = tiny.run_all(engine)
    engine.scheduler.blocks.check()
    return [outputs[str(i)] for i in range(len(batch))]


@pytest.mark.slow
def test_a_mixed_batch(running):
    assert generate(tiny.make_engine(running.model, num_blocks=100), prompts(8)) == running.expected


@pytest.mark.slow
def test_stages_work_at_the_same_time(running):
    engine = tiny.make_engine(running.model, num_blocks=100)
    before = [state.get("steps", 0) for state in running.ranks.states()]
    assert generate(engine, prompts(8)) == running.expected
    at_a_time = engine.stats.under_way / engine.stats.steps
    assert at_a_time > 1.5 if running.ranks.group.place.pipeline > 1 else at_a_time == 1
    # Each rank tells of it within a second.
    until(lambda: all("busy_s" in state for state in running.ranks.states()))
    steps = engine.stats.steps
    until(lambda: all(s["steps"] >= b + steps for s, b in zip(running.ranks.states(), before, strict=True)))


def test_chunks_preemption_and_prefix_hits(running):
    engine = tiny.make_engine(running.model, num_blocks=100, max_batch_tokens=23)
    assert generate(engine, prompts(8)) == running.expected == generate(engine, prompts(8))
    assert engine.stats.cached_tokens > 0
    # The longest request takes four, and one is nobody's.
    engine = tiny.make_engine(running.model, num_blocks=6)
    assert generate(engine, prompts(8)) == running.expected
    assert engine.scheduler.preemptions > 0


def test_drafts_are_verified_by_all_ranks(running):
    speculation = Speculation([NgramProposer()], VerifyEverything(4), vocab_size=256)
    engine = tiny.make_engine(running.model, num_blocks=100, speculation=speculation)
    assert generate(engine, prompts(8)) == running.expected
    assert speculation.stats()["proposed_tokens"] > 0


def test_k_v_are_handed_over_between_divisions(running):
    """What ranks have computed goes on in one process, and the other way round, through the same chunks."""
    whole = tiny.load(running.path)
    assert running.model.kv_shape.layout == whole.kv_shape.layout
    prompt, right = max(zip(prompts(8), running.expected, strict=True), key=lambda pair: len(pair[0]))
    for giving, taking in ((running.model, whole), (whole, running.model), (running.model, running.model)):
        prefix = computed(giving, prompt[:-1])
        engine = tiny.make_engine(taking, num_blocks=40)
        engine.add(tiny.make_request("take", prompt, max_tokens=NEW_TOKENS), read_by(taking, prefix))
        assert tiny.run_all(engine)["take"] == right
        assert engine.stats.cached_tokens == len(prompt) - 1


def test_every_rank_gives_the_pool_its_part(running):
    found, wanted = (all_chunks(model) for model in (running.model, tiny.load(running.path)))
    assert len(found) > 16 and found.keys() == wanted.keys()
    for chunk, payload in found.items():
        torch.testing.assert_close(payload, wanted[chunk], atol=1e-4, rtol=1e-4)
    parts = running.model.kv_shape.published()
    stages = running.ranks.group.place.pipeline
    assert len(parts) >= stages and sum(map(block_bytes, parts.values())) == running.model.kv_shape.layout.block_bytes
    giving = [rank for rank in parts if rank]
    until(lambda: all(running.ranks.states()[rank]["kv_given_bytes"] for rank in giving))


def all_chunks(model) -> dict[str, list[torch.Tensor]]:
    """Each layer's K/V of prompts."""
    engine = tiny.make_engine(model, num_blocks=100, max_batch_tokens=23)
    return {
        meta.chunk_id: layers_of(model, payload, meta.n_tokens)
        for meta, payload in chunks_of(model, engine, *prompts(30))
    }


def test_each_rank_holds_its_part(running):
    states, ranks = running.ranks.states(), running.ranks.leader.ranks
    assert [state["rank"] for state in states] == list(range(ranks))
    assert len({state["pid"] for state in states}) == ranks
    place = running.ranks.group.place
    whole = sum(file.stat().st_size for file in running.path.glob("*.safetensors"))
    for read in (running.model.report["read_bytes"], *(state["read_bytes"] for state in states[1:])):
        assert read < whole * (0.75 if place.tensor > 1 else 0.85)
    # As many as are planned for the fullest rank of each stage.
    config = json.loads((running.path / "config.json").read_text())
    planned = plan_model("tiny", config, read_headers(running.path), item=4)
    split = Split(place.tensor, place.pipeline, place.whole_experts, travel=place.dispatch == "always")
    held = [running.model.report["held_bytes"], *(state["held_bytes"] for state in states[1:])]
    for stage, rank in enumerate(divide(planned, split, batch_tokens=1, sampled=1)):
        fullest = max(held[stage * place.tensor : (stage + 1) * place.tensor])
        assert rank.weight_bytes == pytest.approx(fullest, rel=0.02)
    # What is read is what is held; of heads that lie on several ranks each reads all.
    reads = [running.model.report["read_bytes"], *(state["read_bytes"] for state in states[1:])]
    assert all(has <= read < 1.3 * has for read, has in zip(reads, held, strict=True))
    heads = [layer.kv_heads for part in running.model.kv_shape.parts for layer in part.shape.layers]
    assert sum(heads) >= sum(layer.kv_heads for layer in running.model.kv_shape.layers)
    latent = all(layer.shared for layer in running.model.kv_shape.layers)
    wanted = 1 if latent else max(1, 2 // place.tensor)
    assert max(heads) == wanted or running.path.name in ("phi3", "gpt_neox")
