"""Greedy tokens with adapters equal PEFT's on transformers' ``generate``: whatever the family, the form of the adapter,
and whatever else is in the batch.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from serve_app.adapters.config import AdapterRefused
from serve_app.adapters.weights import read_adapter
from serve_app.models.optimise import difference, probe
from tests import tiny
from tests.parity.test_generate import speculation

NEW_TOKENS = 10
ATTENTION = {"gpt2": ["c_attn"], "gpt_neox": ["query_key_value"], "phi3": ["qkv_proj"]}
FAMILIES = [*tiny.FAMILIES, *tiny.OTHERS]


def forms(family: str) -> list[LoraConfig]:
    """An adapter of all linears (but those of experts), and one of some, with ranks and scales of their own."""
    some = ATTENTION.get(family, ["q_proj", "v_proj"])
    every = ["q_proj", "k_proj", "v_proj", "o_proj"] if family == "mixtral" else "all-linear"
    first = f"layers.0.self_attn.{some[0]}" if family not in ("gpt2", "gpt_neox") else some[0]
    common = {"init_lora_weights": False, "fan_in_fan_out": family == "gpt2"}
    return [
        LoraConfig(r=5, lora_alpha=4, target_modules=every, **common),
        LoraConfig(
            r=4, lora_alpha=6, target_modules=some, use_rslora=True, rank_pattern={first: 7}, alpha_pattern={first: 2},
            **common,
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


def read(folder: Path):
    return read_adapter((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors")


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    found = [[rng.randrange(3, 256) for _ in range(length)] for length in (1, 28, 61, 70, 92)]
    return found


def rows(count: int) -> list[tuple[int, list[int]]]:
    """(adapter, prompt): none, the first and the second in turn."""
    return [(index % 3, prompt) for index, prompt in enumerate(prompts() * 3)][:count]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model with both adapters in its places, the requests, and what PEFT answers to each."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    path = tiny.write_checkpoint(folder / "base", name, num_hidden_layers=2)
    base = tiny.load_reference(path)
    # Gemma's norms behind each block leave little of a small one.
    strength = 1.0 if name == "gemma2" else 0.15
    folders = [make(base, folder / str(i), form, i, strength) for i, form in enumerate(forms(name), start=1)]
    peft = PeftModel.from_pretrained(base, folders[0], adapter_name="1")
    peft.load_adapter(folders[1], adapter_name="2")
    peft.eval()
    wanted = []
    for adapter, prompt in rows(10):
        if adapter:
            peft.set_adapter(str(adapter))
            wanted.append(tiny.reference_tokens(peft, prompt, NEW_TOKENS))
        else:
            with peft.disable_adapter():
                wanted.append(tiny.reference_tokens(peft, prompt, NEW_TOKENS))
    models = {}
    for optimise in (False, True):
        model = tiny.load(path, optimise=optimise, adapters=3)
        for place, one in ((1, folders[0]), (3, folders[1])):
            model.adapters.put(place, model.adapters.prepare(read(one)))
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
    """The drafts are the base's, which knows of no adapters."""
    models, wanted, folders = family
    engine = tiny.make_engine(models[True], num_blocks=200, speculation=speculation(folders[0].parent / "base"))
    assert generate(engine, 10) == wanted
    assert engine.speculation.stats()["proposed_tokens"] > 0


def test_experts_are_refused_by_name(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "base", "mixtral", num_hidden_layers=1)
    parameters = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    folder = make(tiny.load_reference(path), tmp_path / "a", LoraConfig(r=2, init_lora_weights=False, **parameters), 1)
    with pytest.raises(AdapterRefused, match="target_parameters"):
        read(folder)
