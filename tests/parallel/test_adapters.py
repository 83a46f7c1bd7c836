"""Adapters of a model that several ranks divide: what PEFT answers, in one batch with others and without any."""

from __future__ import annotations

import pytest
from peft import LoraConfig, PeftModel

from serve_app.adapters.config import AdapterRefused
from tests import tiny
from tests.adapters import made
from tests.parallel.groups import divided
from tests.parity.test_adapters import ATTENTION, NEW_TOKENS, generate, make, read, rows

pytestmark = pytest.mark.slow
# With four ranks each of two K/V heads lies on two of them. Llama runs on the fused layers.
DIVISIONS = [
    ("llama", 2, 1), ("llama", 4, 1), ("phi3", 2, 1), ("qwen2", 2, 1), ("gemma2", 2, 1),
    ("gpt_oss", 2, 1), ("gpt_neox", 2, 1), ("deepseek_v3", 2, 1),
    # Each stage has its layers' matrices.
    ("llama", 1, 2), ("llama", 2, 2), ("gpt_oss", 1, 2), ("gpt_neox", 1, 2),
]  # fmt: skip


def forms(family: str) -> list[LoraConfig]:
    """Of all linears, and of some."""
    some = (ATTENTION | {"deepseek_v3": ["q_a_proj", "kv_b_proj"]}).get(family, ["q_proj", "v_proj"])
    attention = {"gpt_oss": [*some, "o_proj"], "deepseek_v3": [*some, "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}
    every = attention.get(family, "all-linear")
    common = {"init_lora_weights": False}
    return [
        LoraConfig(r=5, lora_alpha=4, target_modules=every, **common),
        LoraConfig(r=4, lora_alpha=6, target_modules=some, use_rslora=True, **common),
    ]


@pytest.fixture(scope="module", params=DIVISIONS, ids=str)
def running(request, tmp_path_factory, one_thread):
    family, tensor, pipeline = request.param
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
    with divided(path, tensor, pipeline, adapters=3) as found:
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
