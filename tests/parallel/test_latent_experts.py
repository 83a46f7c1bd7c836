"""Nemotron 3, whose experts work on latents that are narrower than the model, on ranks: what ``generate`` answers, and
as many bytes as are planned."""

from __future__ import annotations

import json

import pytest
from transformers import NemotronHForCausalLM

from serve_app.planning.ranks import Split, divide
from serve_app.planning.source import plan_model
from serve_app.planning.tensors import read_headers
from tests import tiny
from tests.parallel.groups import divided
from tests.parity.test_stateful import NEW_TOKENS, generate, prompts

pytestmark = pytest.mark.slow
# Ranks that divide layers, stages, whole experts.
DIVISIONS = [(2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_experts_that_work_on_latents(tmp_path, one_thread, division):
    tensor, pipeline, whole = division
    path = tiny.write_small(tmp_path, NemotronHForCausalLM, moe_latent_size=16)
    reference = tiny.load_reference(path)
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(6)]
    with divided(path, tensor, pipeline, expert_parallel=tensor if whole else 1) as found:
        engine = tiny.make_engine(found.model, num_blocks=100, max_batch_tokens=23)
        assert generate(engine, prompts(6)) == expected
        held = [found.model.report["held_bytes"], *(state["held_bytes"] for state in found.ranks.states()[1:])]
        assert found.lost == []
    planned = plan_model("tiny", json.loads((path / "config.json").read_text()), read_headers(path), item=4)
    for stage, rank in enumerate(divide(planned, Split(tensor, pipeline, whole), batch_tokens=1, sampled=1)):
        fullest = max(held[stage * tensor : (stage + 1) * tensor])
        assert rank.weight_bytes == pytest.approx(fullest, rel=0.02)
