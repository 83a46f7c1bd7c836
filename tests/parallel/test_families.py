"""Families beside those of ``test_divided``, each written as small as the check at load makes it: on several ranks they
answer as transformers' ``generate`` does."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from serve_app.planning.ranks import Split, divide
from serve_app.planning.source import plan_model
from serve_app.planning.tensors import read_headers
from tests import tiny
from tests.parallel.groups import divided
from tests.parallel.test_divided import NEW_TOKENS, generate, prompts
from tests.variants import some

# How they differ from their default configuration.
FAMILIES = {
    "Llama4ForCausalLM": {"num_experts_per_tok": 2},
    "Gemma3ForCausalLM": {},
    "Gemma4ForCausalLM": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "Glm4MoeLiteForCausalLM": {},
    "GraniteForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Kimi_K25ForConditionalGeneration": {},
    "DeepseekV32ForCausalLM": {},
    "GlmMoeDsaForCausalLM": {"indexer_types": ["full", "shared", "full", "shared"]},
    "AXK2ForCausalLM": {},
    "DeepseekV4ForCausalLM": {},
    "Glm5NextForConditionalGeneration": {},
    "HYV4ForCausalLM": {"indexer_types": ["full", "full", "shared", "full"]},
}  # fmt: skip
DENSE = ("Gemma3ForCausalLM", "GraniteForCausalLM", "NemotronForCausalLM")
KEEPING = ("DeepseekV4ForCausalLM", "Glm5NextForConditionalGeneration")  # states
# Family, ranks that divide layers, stages, and how rows go to whole experts ("": ranks divide each expert).
CASES = [(family, *ranks, "") for family in FAMILIES for ranks in ((2, 1), (2, 2))]
CASES += [
    (family, *ranks)
    for family in FAMILIES
    if family not in DENSE
    for ranks in ((2, 1, "never"), (2, 2, "never"), (2, 1, "always"))
    if ranks[2] == "never" or family not in KEEPING
]


@pytest.mark.parametrize("case", some(CASES, ("Llama4ForCausalLM", 2, 1, "never")), ids=str)
def test_greedy_tokens_are_those_of_generate(tmp_path, one_thread, case):
    family, tensor, pipeline, way = case
    kind = getattr(transformers, family)
    path = tiny.write_small(tmp_path, kind, **FAMILIES[family])
    # Not by transformers' AutoModelForCausalLM, which does not know all of them.
    reference = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(6)]
    ways = {"expert_parallel": tensor, "expert_dispatch": way} if way else {}
    with divided(path, tensor, pipeline, **ways) as found:
        assert bool(found.model.report.get("expert_dispatch")) == (way == "always")
        # In chunks, with hits, and preempted.
        engine = tiny.make_engine(found.model, num_blocks=100, max_batch_tokens=23)
        assert generate(engine, prompts(6)) == expected == generate(engine, prompts(6))
        assert engine.stats.cached_tokens > 0
        engine = tiny.make_engine(found.model, num_blocks=6)
        assert generate(engine, prompts(6)) == expected
        assert engine.scheduler.preemptions > 0
        assert found.lost == []
        held = [found.model.report["held_bytes"], *(state["held_bytes"] for state in found.ranks.states()[1:])]
    config = json.loads((path / "config.json").read_text())
    planned = plan_model("tiny", config, read_headers(path), item=4)
    split = Split(tensor, pipeline, bool(way), travel=way == "always")
    for stage, rank in enumerate(divide(planned, split, batch_tokens=1, sampled=1)):
        fullest = max(held[stage * tensor : (stage + 1) * tensor])
        assert rank.weight_bytes == pytest.approx(fullest, rel=0.02)
