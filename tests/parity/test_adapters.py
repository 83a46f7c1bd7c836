"""Greedy tokens with adapters equal PEFT's on transformers' ``generate``: whatever the family, the form of the adapter,
and whatever else is in the batch.
"""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, save, save_file

from serve_app.adapters.check import check_weights
from serve_app.adapters.config import AdapterRefused, read_config
from serve_app.adapters.shapes import base_of
from serve_app.models.loading.bare import publish
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.adapters.made import config, weights
from tests.parity.test_generate import speculation
from tests.variants import some

NEW_TOKENS = 10
ATTENTION = {"gpt2": ["c_attn"], "gpt_neox": ["query_key_value"], "phi3": ["qkv_proj"]}
FAMILIES = [*tiny.FAMILIES, *tiny.OTHERS, *tiny.MIXTURES, *tiny.STATEFUL]
MIXTURES = ["mixtral", *tiny.MIXTURES]


def forms(family: str) -> list[LoraConfig]:
    """An adapter of all linears, experts and routers among them, and one of some, with its own ranks and scales."""
    if family in MIXTURES:
        return mixtures(family)
    some = ATTENTION.get(family, ["q_proj", "v_proj"])
    first = f"layers.0.self_attn.{some[0]}" if family not in ("gpt2", "gpt_neox") else some[0]
    common = {"init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    if family == "jamba":  # which takes this one's weight and never calls it
        common["exclude_modules"] = ["dt_proj"]
    return [
        LoraConfig(r=5, lora_alpha=4, target_modules="all-linear", **common),
        LoraConfig(
            r=4, lora_alpha=6, target_modules=some, use_rslora=True, rank_pattern={first: 7}, alpha_pattern={first: 2},
            **common,
        ),
    ]  # fmt: skip


def mixtures(family: str) -> list[LoraConfig]:
    """PEFT makes one of all experts and of the router of "all-linear" where it knows the model."""
    every = {"target_modules": "all-linear"}
    if family == "gpt_oss":
        every["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj", "router.weight"]
    return [
        LoraConfig(r=5, lora_alpha=4, init_lora_weights=False, **every),
        LoraConfig(
            r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], use_rslora=True,
            rank_pattern={"layers.0.mlp.experts.down_proj": 3}, alpha_pattern={"down_proj": 2}, init_lora_weights=False,
        ),
    ]  # fmt: skip


def make(base: torch.nn.Module, folder: Path, form: LoraConfig, seed: int, strength: float = 0.15) -> Path:
    torch.manual_seed(seed)
    model = get_peft_model(base, form)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, strength)
    model.save_pretrained(folder)
    model.unload()
    return folder


def read(model, folder: Path):
    return model.adapters.read((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors")


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    found = [[rng.randrange(3, 256) for _ in range(length)] for length in (1, 28, 61, 70, 92)]
    return found


def rows(count: int) -> list[tuple[int, list[int]]]:
    """(adapter, prompt): none, the first and the second in turn."""
    return [(index % 3, prompt) for index, prompt in enumerate(prompts() * 3)][:count]


@pytest.fixture(scope="module", params=some(FAMILIES, "gemma2", "gpt_oss", *tiny.STATEFUL))
def family(request, tmp_path_factory):
    """A model with both adapters in its places, the requests, and what PEFT answers to each."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    path = tiny.write_checkpoint(folder / "base", name, num_hidden_layers=2)
    base = tiny.load_reference(path)
    # Gemma's norms behind each block leave little of a small one.
    strength = 1.0 if name == "gemma2" else 0.15
    folders = [make(base, folder / str(i), form, i, strength) for i, form in enumerate(forms(name), start=1)]
    asked = rows(10)
    wanted: list[list[int]] = [[]] * len(asked)
    for adapter in (0, 1, 2):
        model = tiny.load_reference(path)
        if adapter:  # one at a time: PEFT keeps no two on different weights of a mixture
            model = PeftModel.from_pretrained(model, folders[adapter - 1]).eval()
        for index, (which, prompt) in enumerate(asked):
            if which == adapter:
                wanted[index] = tiny.reference_tokens(model, prompt, NEW_TOKENS)
    models = {}
    for optimise in (False, True):
        model = tiny.load(path, optimise=optimise, adapters=3)
        for place, one in ((1, folders[0]), (3, folders[1])):
            model.adapters.put(place, read(model, one))
        models[optimise] = model
    return models, wanted, folders


PLACES = (0, 1, 3)


def generate(engine, count: int) -> list[list[int]]:
    for index, (adapter, prompt) in enumerate(rows(count)):
        root = tiny.ROOT + bytes([adapter])
        request = tiny.make_request(str(index), prompt, root=root, max_tokens=NEW_TOKENS)
        request.adapter = PLACES[adapter]
        engine.add(request)
    outputs = tiny.run_all(engine)
    return [outputs[str(index)] for index in range(count)]


def test_adapters_change_what_is_said(family):
    """Else the other tests would show nothing. The tiny Gemma repeats its prompt whatever it is told, so that its
    logits are compared.
    """
    models, wanted, _ = family
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for index, tokens in enumerate(wanted):
        by_prompt.setdefault(index % 5, set()).add(tuple(tokens))
    if type(models[True].module).__name__ != "Gemma2ForCausalLM":
        assert sum(len(answers) > 1 for answers in by_prompt.values()) >= 4
        return
    base, adapted = (probe(models[True], in_place(models[True], place)) for place in (0, 1))
    assert difference(adapted, base) > 0.02


def in_place(model, place: int):
    def forward(batch):
        batch.adapters = torch.full((len(batch.input_ids),), place)
        return model.forward(batch)

    return forward


@pytest.mark.parametrize("optimise", [False, True], ids=["transformers", "optimised"])
def test_a_mixed_batch(family, optimise):
    models, wanted, _ = family
    assert generate(tiny.make_engine(models[optimise], num_blocks=200), 10) == wanted


def test_chunks_preemption_and_prefix_hits(family):
    models, wanted, _ = family
    assert generate(tiny.make_engine(models[True], num_blocks=200, max_batch_tokens=23), 10) == wanted
    engine = tiny.make_engine(models[True], num_blocks=8)
    assert generate(engine, 10) == wanted
    assert engine.scheduler.preemptions > 0
    engine = tiny.make_engine(models[True], num_blocks=200)
    assert generate(engine, 10) == wanted == generate(engine, 10)
    assert engine.stats.cached_tokens > 0


def test_drafts_are_verified_by_the_model_with_its_adapter(family):
    """The drafts are the base's, which knows of no adapters, or another's where the base can't draft."""
    models, wanted, folders = family
    draft = folders[0].parent / "base"
    if models[True].kv_shape.states.parts:
        with pytest.raises(ValueError, match="can't take back tokens that did not stand"):
            speculation(draft)
        draft = tiny.write_checkpoint(folders[0].parent / "draft", "llama")
    engine = tiny.make_engine(models[True], num_blocks=200, speculation=speculation(draft))
    assert generate(engine, 10) == wanted
    assert engine.speculation.stats()["proposed_tokens"] > 0


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("rslora", some([False, True], True), ids=["", "rslora"])
def test_an_adapter_with_a_linear_for_each_expert(tmp_path, family, rslora):
    """As peft wrote it before transformers joined them; today's peft joins them when it loads them."""
    path = tiny.write_checkpoint(tmp_path / "base", family, num_hidden_layers=1)
    model = tiny.load(path, optimise=True, adapters=1)
    sizes = {name: (place.widths[0], place.columns) for place in model.adapters.linears for name in place.names}
    names = ("w1", "w3", "w2", "gate") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj", "gate")
    block = "model.layers.0." + ("block_sparse_moe" if family == "mixtral" else "mlp")
    (n, k), (hidden, inner) = (sizes[f"model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    shapes = {f"{block}.gate": sizes["model.layers.0.mlp.gate.weight"]}
    for expert in range(4):
        for name, shape in zip(names, ((n // 2, k), (n // 2, k), (hidden, inner)), strict=False):
            shapes[f"{block}.experts.{expert}.{name}"] = shape
    folder = tmp_path / "old"
    folder.mkdir()
    told = config(r=3, lora_alpha=5, use_rslora=rslora, target_modules=list(names), task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_bytes(told)
    tensors = {name: 3 * tensor for name, tensor in load(weights(shapes, rank=3)).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    model.adapters.put(1, read(model, folder))
    peft = PeftModel.from_pretrained(tiny.load_reference(path), folder).eval()
    request = tiny.make_request("a", prompts()[2], max_tokens=NEW_TOKENS)
    request.adapter = 1
    engine = tiny.make_engine(model)
    engine.add(request)
    wanted = tiny.reference_tokens(peft, prompts()[2], NEW_TOKENS)
    assert tiny.run_all(engine)["a"] == wanted
    assert tiny.reference_tokens(tiny.load_reference(path), prompts()[2], NEW_TOKENS) != wanted
    some = {name: tensor for name, tensor in tensors.items() if ".experts.2." not in name}
    with pytest.raises(AdapterRefused, match="3 of .* 4 experts"):
        model.adapters.read(told, save(some))


def test_uploads_are_checked_as_they_are_served(family, tmp_path):
    """By the modules that the configuration says, without the weights: rank, sizes, and what would not be served."""
    _, _, folders = family
    publish(folders[0].parent / "base", tmp_path)
    base = base_of(folders[0].parent / "base", tmp_path)
    for folder in folders:
        told = read_config((folder / "adapter_config.json").read_bytes())
        with (folder / "adapter_model.safetensors").open("rb") as file:
            assert 4 <= check_weights(told, file, base) <= 7
    tensors = load((folders[0] / "adapter_model.safetensors").read_bytes())
    for name in tensors:
        lacks = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(AdapterRefused, match="has no lora_"):
            check_weights(read_config((folders[0] / "adapter_config.json").read_bytes()), BytesIO(save(lacks)), base)
