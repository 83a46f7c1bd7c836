"""Adapters of a model that several ranks divide: what PEFT answers, in one batch with others and without any."""

from __future__ import annotations

import pytest
from peft import LoraConfig, PeftModel

from serve_app.adapters.config import AdapterRefused
from serve_app.engine.build import record_steps
from serve_app.parallel.experts import folder_of, keep_loads
from tests import tiny
from tests.adapters import made
from tests.parallel.groups import divided
from tests.parity.test_adapters import ATTENTION, MIXTURES, NEW_TOKENS, generate, make, mixtures, read, rows

pytestmark = pytest.mark.slow
# With four ranks each of two K/V heads lies on two of them. Llama runs on the fused layers.
DIVISIONS = [
    ("llama", 2, 1), ("llama", 4, 1), ("phi3", 2, 1), ("qwen2", 2, 1), ("gemma2", 2, 1),
    ("gpt_oss", 2, 1), ("gpt_neox", 2, 1), ("deepseek_v3", 2, 1),
    # Each stage has its layers' matrices.
    ("llama", 1, 2), ("llama", 2, 2), ("gpt_oss", 1, 2), ("gpt_neox", 1, 2),
    # Experts are divided in their columns, or each rank holds some whole, with copies of some.
    ("mixtral", 2, 1), ("mixtral", 4, 1), ("qwen3_moe", 2, 2), ("qwen2_moe", 2, 1), ("glm4_moe", 2, 1),
    ("mixtral", 2, 1, "whole"), ("gpt_oss", 2, 1, "whole"), ("deepseek_v3", 2, 2, "whole"),
    ("qwen3_moe", 4, 1, "whole"), ("mixtral", 2, 1, "copies"), ("qwen2_moe", 2, 2, "copies"),
    # Every second layer keeps a state.
    ("qwen3_next", 2, 1), ("qwen3_next", 2, 2), ("jamba", 2, 1),
    # Indexers lie whole on each rank.
    ("glm_moe_dsa", 2, 1), ("glm_moe_dsa", 2, 2), ("deepseek_v4", 2, 1), ("deepseek_v4", 2, 2),
]  # fmt: skip
SOME = {
    "deepseek_v3": ["q_a_proj", "kv_b_proj"], "glm_moe_dsa": ["q_a_proj", "kv_b_proj"],
    "deepseek_v4": ["q_a_proj", "kv_proj"],
}  # fmt: skip


def forms(family: str) -> list[LoraConfig]:
    """Of all linears, and of some; of a mixture's experts and router as well."""
    if family in MIXTURES:
        return mixtures(family)
    some = (ATTENTION | SOME).get(family, ["q_proj", "v_proj"])
    every, common = "all-linear", {"init_lora_weights": False}
    more = {}
    if family == "deepseek_v3":
        every = [*some, "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        more["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    if family == "glm_moe_dsa":
        every = [*some, "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "wq_b", "wk", "weights_proj"]
    if family == "deepseek_v4":
        every = [*some, "q_b_proj", "gate_proj", "o_b_proj", "weights_proj"]
    if family == "jamba":  # which takes this one's weight and never calls it
        common["exclude_modules"] = ["dt_proj"]
    return [
        LoraConfig(r=5, lora_alpha=4, target_modules=every, **common, **more),
        LoraConfig(r=4, lora_alpha=6, target_modules=some, use_rslora=True, **common),
    ]


@pytest.fixture(scope="module", params=DIVISIONS, ids=str)
def running(request, tmp_path_factory, one_thread):
    family, tensor, pipeline, *whole = request.param
    folder = tmp_path_factory.mktemp(family)
    path = tiny.write_checkpoint(folder / "base", family)
    base = tiny.load_reference(path)
    strength = 1.0 if family == "gemma2" else 0.15
    folders = [make(base, folder / str(i), form, i, strength) for i, form in enumerate(forms(family), start=1)]
    asked = rows(9)
    wanted: list[list[int]] = [[]] * len(asked)
    for adapter in (0, 1, 2):
        model = tiny.load_reference(path)
        if adapter:
            model = PeftModel.from_pretrained(model, folders[adapter - 1]).eval()
        for index, (which, prompt) in enumerate(asked):
            if which == adapter:
                wanted[index] = tiny.reference_tokens(model, prompt, NEW_TOKENS)
    ways = {"expert_parallel": tensor, "expert_copies": int(whole == ["copies"])} if whole else {}
    if whole == ["copies"]:
        count = {"mixtral": 4, "qwen2_moe": 6}[family]
        wanted_before = {f"model.layers.{i}.mlp.experts": [(3 + i * n) % 7 + 1 for n in range(count)] for i in range(3)}
        keep_loads(folder_of(str(path.parent), "@cf/tests/divided"), "layers-0-3", wanted_before)
    with divided(path, tensor, pipeline, adapters=3, **ways) as found:
        assert found.model.report.get("expert_copies", "the busiest").startswith("the busiest")
        found.family = family
        yield found, folders, wanted
        assert found.lost == []


def test_each_row_runs_through_its_own(running):
    found, folders, wanted = running
    bank = found.model.adapters
    prepared = [read(found.model, folder) for folder in folders]
    for place, one in ((1, prepared[0]), (3, prepared[1])):
        bank.put(place, one)
    engine = tiny.make_engine(found.model, num_blocks=100)
    assert generate(engine, len(wanted)) == wanted
    if found.ranks.group.place.pipeline == 1 and not found.model.kv_shape.states.parts:
        # Steps that are recorded have graphs of their own for batches with adapters.
        recorded = tiny.make_engine(found.model, num_blocks=100, max_num_seqs=16)
        record_steps(recorded.runner, 16, found.model.max_model_len)
        assert generate(recorded, len(wanted)) == wanted
    small = tiny.make_engine(found.model, num_blocks=6, max_batch_tokens=23, kept=0)
    assert generate(small, len(wanted)) == wanted and small.scheduler.preemptions > 0
    # Places are given anew, and what is taken out is out.
    bank.put(1, prepared[1])
    bank.put(3, prepared[0])
    other = generate(tiny.make_engine(found.model, num_blocks=100), len(wanted))
    assert [other[i] for i in range(0, 9, 3)] == [wanted[i] for i in range(0, 9, 3)]
    # The tiny Gemma repeats its prompt whatever it is told.
    assert other != wanted or found.family == "gemma2"
    bank.clear(1)
    bank.clear(3)
    bare = generate(tiny.make_engine(found.model, num_blocks=100), len(wanted))
    assert [bare[i] for i in range(0, 9, 3)] == [wanted[i] for i in range(0, 9, 3)]
    assert bare != other or found.family == "gemma2"


def test_one_of_another_model_is_refused_before_any_rank_hears_of_it(running):
    """Even where it would fit the part of one rank."""
    found, _, _ = running
    for layer in (0, 2):  # of the first stage and of the last
        weights = made.weights(
            {f"model.layers.{layer}.self_attn.o_proj": (64, 64 // found.ranks.group.place.tensor // 2)}
        )
        with pytest.raises(AdapterRefused):
            found.model.adapters.read(made.config(target_modules=["o_proj"]), weights)
