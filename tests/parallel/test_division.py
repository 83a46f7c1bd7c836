"""What of a model a rank has, read off a model without memory, and what can't be divided."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from serve_app.catalog.load import load_catalog
from serve_app.models.divided.division import Cut, bare, dispatch_from, divide, keep_groups
from serve_app.models.divided.load import refuse_divided
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.miniature import Sizes, scale_down
from serve_app.parallel.dispatch import LOOPBACK, WAYS
from serve_app.parallel.place import Place
from serve_app.parallel.stages import stages
from serve_app.planning.described import full_config, without_weights
from serve_app.planning.source import published
from tests import tiny
from tests.planning.large import LARGE


@pytest.mark.parametrize(("record", "name"), LARGE.items())
def test_published_models_have_the_division_of_their_record(record, name, tmp_path):
    """Every size divides, every layer is on one stage, and ranks cut tensors of every layer that keeps no states."""
    stage = load_catalog(tmp_path)[record].serving["gpu"].stages["decode"]
    config = published()[name]
    module = without_weights(config, full_config(config))
    ranks = [
        Place(stage.tensor_parallel, stage.pipeline_parallel, rank, whole_experts=stage.expert_parallel > 1)
        for rank in range(stage.ranks)
    ]
    divisions = [divide(module, place) for place in (ranks[0], ranks[-1])]
    text = module.config.get_text_config()
    assert sum(end - begin for begin, end in divisions[0].stages) == divisions[0].layers == text.num_hidden_layers
    assert sum(divisions[0].widths) == text.vocab_size and len(divisions[0].widths) == stage.tensor_parallel
    if stage.tensor_parallel > 1:
        of_layers = {name for name in divisions[-1].cuts if ".layers." in name}
        # Of Nemotron-H a layer that keeps states has nothing else.
        kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
        cut = {int(each.split(".layers.")[1].split(".")[0]) for each in of_layers}
        assert cut >= {index for index, kind in enumerate(kinds) if kind != "linear_attention"}


def test_a_llama_by_its_own_plan():
    division = divide(bare(LlamaForCausalLM, LlamaConfig(**tiny.COMMON)), Place(2, 1, 1))
    layer = "model.layers.2"
    assert division.cuts[f"{layer}.self_attn.k_proj.weight"] == Cut(0)
    assert division.cuts[f"{layer}.mlp.down_proj.weight"] == Cut(1)
    assert division.cuts["lm_head.weight"] == Cut(0)
    names = ("self_attn.o_proj", "mlp.down_proj")
    assert division.summed == {f"model.layers.{i}.{name}" for i in range(3) for name in names}
    assert division.heads == dict.fromkeys(range(3), 2) and division.widths == [128, 128]
    assert not division.few and not division.sliced and not division.joined


def test_fewer_heads_than_ranks():
    division = divide(bare(LlamaForCausalLM, LlamaConfig(**tiny.COMMON)), Place(4, 1, 1))
    assert division.few["model.layers.0.self_attn.k_proj"] == 2
    assert "model.layers.0.self_attn.k_proj.weight" not in division.cuts
    assert division.all_heads(0, 1) == 2


def test_experts_are_divided_in_their_columns():
    config = MixtralConfig(**tiny.COMMON, num_local_experts=4)
    division = divide(bare(MixtralForCausalLM, config), Place(2))
    assert division.experts == {f"model.layers.{i}.mlp.experts" for i in range(3)}
    assert division.cuts["model.layers.0.mlp.experts.gate_up_proj"] == Cut(1, pieces=2)
    assert division.cuts["model.layers.0.mlp.experts.down_proj"] == Cut(2)


def test_whole_experts_lie_on_one_rank():
    config = MixtralConfig(**tiny.COMMON, num_local_experts=4)
    division = divide(bare(MixtralForCausalLM, config), Place(2, whole_experts=True))
    assert division.experts == {f"model.layers.{i}.mlp.experts" for i in range(3)}
    for name in ("gate_up_proj", "down_proj"):
        assert division.cuts[f"model.layers.0.mlp.experts.{name}"] == Cut(0)
    assert division.cuts["model.layers.0.self_attn.q_proj.weight"] == Cut(0)


def test_experts_that_are_not_told_of_rows_are_not_held_whole():
    """Llama 4's are, by a block that routes rows itself; of another form they are refused before anything is read."""
    config = Llama4TextConfig(**tiny.COMMON | {"head_dim": 16, "num_local_experts": 4})
    module = bare(Llama4ForCausalLM, config)
    division = divide(module, Place(2, whole_experts=True))
    names = {name for name, _ in module.named_modules() if name.endswith(".experts")}
    assert division.experts == names and division.blocks == {name.rpartition(".")[0] for name in names}
    for block in {name.rpartition(".")[0] for name in names}:
        module.get_submodule(block).other = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match="is not told which row has chosen which expert"):
        divide(module, Place(2, whole_experts=True))


def test_layers_with_inputs_of_their_own_keep_all_rows():
    module = bare(Gemma4ForCausalLM, PER_LAYER)
    assert dispatch_from(module, Place(4, whole_experts=True, dispatch="auto"), 4, LOOPBACK) == 0
    with pytest.raises(UnsupportedModel, match="expert_dispatch: always does not go with them"):
        divide(module, Place(2), 1)
    # Two stages that have the embeddings both, since the head is the same.
    assert divide(module, Place(1, 2)).stages


def test_heads_of_latent_attention_are_divided_and_the_latent_is_everybodys():
    config_class, model_class, extra = tiny.LATENT["deepseek_v3"]
    division = divide(bare(model_class, config_class(**tiny.COMMON | extra)), Place(2))
    own = "model.layers.1.self_attn"
    assert division.cuts[f"{own}.kv_b_proj.weight"] == division.cuts[f"{own}.q_b_proj.weight"] == Cut(0)
    assert division.cuts[f"{own}.kv_a_proj_with_mqa.weight"] == division.cuts[f"{own}.o_proj.weight"] == Cut(1)
    assert {f"{own}.q_a_proj", f"{own}.kv_a_proj_with_mqa"} <= division.sliced and f"{own}.o_proj" in division.summed


def test_a_shared_expert_is_divided_as_any_mlp():
    config_class, model_class, extra = tiny.MIXTURES["qwen2_moe"]
    division = divide(bare(model_class, config_class(**tiny.COMMON | extra)), Place(2))
    assert division.cuts["model.layers.0.mlp.shared_expert.up_proj.weight"] == Cut(0)
    # What it gives is added up with what the other experts give.
    assert "model.layers.0.mlp.shared_expert.down_proj" not in division.summed
    assert division.blocks == {f"model.layers.{i}.mlp" for i in range(3)}
    assert "model.layers.0.mlp.shared_expert_gate.weight" not in division.cuts


def test_where_rows_travel_shared_experts_are_whole():
    config_class, model_class, extra = tiny.MIXTURES["qwen2_moe"]
    module = bare(model_class, config_class(**tiny.COMMON | extra))
    ways = {way: Place(2, whole_experts=True, dispatch=way) for way in WAYS}
    # They are divided where that is not asked for.
    assert {way: dispatch_from(module, place, 4, LOOPBACK) for way, place in ways.items()} == {
        "auto": 0, "always": 1, "never": 0,
    }  # fmt: skip
    division = divide(module, ways["always"], 1)
    assert not any("shared_expert" in name for name in division.cuts) and not division.blocks
    wide = MixtralConfig(**tiny.COMMON | {"hidden_size": 4096}, num_local_experts=8)
    found = dispatch_from(bare(MixtralForCausalLM, wide), Place(4, whole_experts=True, dispatch="auto"), 4, LOOPBACK)
    assert found > 32


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_have_all_layers_between_them(stages):
    module = bare(LlamaForCausalLM, LlamaConfig(**tiny.COMMON))
    held = [divide(module, Place(1, stages, rank)).held for rank in range(stages)]
    assert [i for each in held for i in each] == [0, 1, 2] and all(held)


LLAMA = LlamaConfig(**tiny.COMMON)
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
ODD_EXPERTS = MixtralConfig(**tiny.COMMON, num_local_experts=5)
LATENT = DeepseekV3Config(**tiny.COMMON | tiny.LATENT["deepseek_v3"][2])
ODD = LlamaConfig(**tiny.COMMON | HEADS)
WIDE = tiny.COMMON | {"hidden_size": 128, "num_local_experts": 4, "head_dim": 32}
PER_LAYER = Gemma4TextConfig(
    **tiny.COMMON | {"head_dim": 16}, hidden_size_per_layer_input=16, vocab_size_per_layer_input=256
)
WIDE_EXPERTS = MixtralConfig(**WIDE)
NARROW_EXPERTS = MixtralConfig(**WIDE | {"intermediate_size": 192})


@pytest.mark.parametrize(
    ("model", "config", "place", "said"),
    [
        (GPT2LMHeadModel, GPT2Config(n_layer=2, n_embd=32, n_head=2), Place(2), "has no plan by which ranks divide"),
        (LlamaForCausalLM, LLAMA, Place(3), "which 3 ranks can't divide"),
        (LlamaForCausalLM, ODD, Place(2), "6 query heads and 3 K/V heads, which 2 ranks can't divide"),
        (LlamaForCausalLM, LLAMA, Place(1, 4), "3 layers do not make 4 stages"),
        (DeepseekV3ForCausalLM, LATENT, Place(8), "has 4 heads, which 8 ranks can't divide"),
        (LlamaForCausalLM, LLAMA, Place(2, whole_experts=True), "names no experts of LlamaForCausalLM"),
        (MixtralForCausalLM, ODD_EXPERTS, Place(2, whole_experts=True), "has 5 experts, which 2 ranks can't divide"),
        (Gemma4ForCausalLM, PER_LAYER, Place(1, 3), "have inputs of their own, made of the embeddings"),
        (Gemma4ForCausalLM, PER_LAYER, Place(2, 2), "have inputs of their own, made of the embeddings"),
    ],
)
def test_what_can_not_be_divided_is_named(model, config, place, said):
    with pytest.raises(UnsupportedModel, match=said):
        divide(bare(model, config), place)


def test_layers_that_take_over_chosen_keys_stay_with_the_one_before_them():
    kinds = ["full", "shared", "shared", "shared", "full", "full", "shared", "shared"]
    module = bare(GlmMoeDsaForCausalLM, scale_down(GlmMoeDsaConfig(), Sizes(layers=8), indexer_types=kinds))
    for count in (2, 3):
        begins = {begin for begin, _ in divide(module, Place(1, count)).stages}
        assert begins <= {0, 4, 5} and len(begins) == count
    with pytest.raises(UnsupportedModel, match="8 layers do not make 4 stages: some take over the keys"):
        divide(module, Place(1, 4))


def test_outputs_in_groups_that_do_not_divide_stay_whole_with_their_attention():
    """DeepSeek V4's of eight groups."""
    module = bare(DeepseekV4ForCausalLM, scale_down(DeepseekV4Config(), o_groups=2, num_attention_heads=4))
    for tensor in (2, 4):
        cuts = {name for name in divide(module, Place(tensor)).cuts if ".layers.1." in name}
        attention = {name.rpartition("self_attn.")[2] for name in cuts if "self_attn" in name}
        assert ("o_a_proj.weight" in attention) == (tensor == 2) and bool(attention) == (tensor == 2)
        assert any("mlp.experts" in name for name in cuts)


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_stage_holds_least(seed):
    """Of all ways to cut, those that part no layer from the one that it follows."""
    rng = random.Random(seed)
    costs = [rng.randrange(1, 9) for _ in range(7)]
    follows = [False, *(rng.random() < 0.4 for _ in range(6))]
    ends = (rng.randrange(6), rng.randrange(6))
    begins = [at for at in range(1, 7) if not follows[at]]
    for count in range(1, len(begins) + 2):
        found = stages(costs, count, ends, follows)
        assert [each[1] for each in found[:-1]] == [each[0] for each in found[1:]]
        assert all(begin in (0, *begins) for begin, _ in found) and (found[0][0], found[-1][1]) == (0, 7)

        def fullest(cuts):
            sizes = [sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, 7))]
            sizes[0] += ends[0]
            sizes[-1] += ends[1]
            return max(sizes)

        best = min(fullest(cuts) for cuts in itertools.combinations(begins, count - 1))
        assert fullest([begin for begin, _ in found[1:]]) == best


@pytest.mark.parametrize(
    ("model", "config", "place", "said"),
    [
        (LlamaForCausalLM, LLAMA, Place(2), r"o_proj.weight has 64 columns, 32 for each of 2 ranks, and 64 of them"),
        (LlamaForCausalLM, LLAMA, Place(1, 2), ""),
        (MixtralForCausalLM, WIDE_EXPERTS, Place(2), ""),
        (MixtralForCausalLM, NARROW_EXPERTS, Place(2), r"down_proj has 192 columns, 96 for each.*expert_parallel"),
        (MixtralForCausalLM, NARROW_EXPERTS, Place(2, whole_experts=True), ""),
        (GptOssForCausalLM, GptOssConfig(**WIDE | {"intermediate_size": 192}), Place(2), "down_proj has 192 columns"),
    ],
)
def test_columns_that_are_rounded_together_stay_together(model, config, place, said):
    whole = bare(model, config)
    division = divide(whole, place)
    if not said:
        return keep_groups(whole, division)
    with pytest.raises(UnsupportedModel, match=said):
        keep_groups(whole, division)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"plug": lambda place, linear: linear}, "plugged linears"),
        ({"family": "mllama"}, "mllama's layers that attend to pictures and several ranks"),
    ],
)
def test_features_that_are_not_divided_yet_are_refused(asked, said):
    with pytest.raises(UnsupportedModel, match=said):
        refuse_divided(**{"family": "llama", "plug": None} | asked)
