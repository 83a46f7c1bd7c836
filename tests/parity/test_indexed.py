"""Models whose indexers choose the keys that queries attend to: the same greedy tokens as transformers' ``generate``,
with texts of fewer and of more tokens than are chosen in one step."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel

from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.speculate import Speculation
from serve_app.models import indexed
from serve_app.models.load import load_causal_lm
from tests import tiny
from tests.parity.test_adapters import make, read
from tests.parity.test_stateful import Guesses
from tests.variants import some

NEW_TOKENS = 20
FAMILIES = {
    "DeepseekV32ForCausalLM": {},
    # Layers that take over what the one before them has chosen.
    "GlmMoeDsaForCausalLM": {"indexer_types": ["full", "shared", "shared", "full"]},
    "AXK2ForCausalLM": {},
    "HYV4ForCausalLM": {"indexer_types": ["full", "shared", "full", "full"]},
    "MistralLarge4ForConditionalGeneration": {},
    # Windows alone, entries of either kind beside them.
    "DeepseekV4ForCausalLM": {
        "layer_types": ["sliding_attention", *(f"{kind}_attention" for kind in (
            "compressed_sparse", "heavily_compressed", "compressed_sparse"))],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "num_hidden_layers": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=some(FAMILIES, "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM"))
def family(request, tmp_path_factory, one_thread):
    made = getattr(transformers, request.param)
    path = tiny.write_small(tmp_path_factory.mktemp("model"), made, **FAMILIES[request.param])
    # Not by transformers' AutoModelForCausalLM, which does not know all of them.
    reference = made.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return tiny.load(path), reference, path


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 250) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def expected(family):
    found = [tiny.reference_tokens(family[1], p, NEW_TOKENS, eos_token_id=None) for p in prompts(10)]
    assert len({tuple(each) for each in found}) == 10
    return found


def generate(engine, batch, **sampling):
    for index, prompt in enumerate(batch):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=NEW_TOKENS, ignore_eos=True, **sampling))
    outputs = tiny.run_all(engine)
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == 0
    return [outputs[str(i)] for i in range(len(batch))]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 23}, {"max_num_seqs": 1}], ids=str)
def test_together_in_chunks_and_alone(family, expected, options):
    assert generate(tiny.make_engine(family[0], num_blocks=200, **options), prompts(10)) == expected


def test_scores_are_computed_a_few_rows_at_a_time(family, expected, monkeypatch):
    monkeypatch.setattr(indexed, "SCORES", 4 * 16 * 400)
    assert generate(tiny.make_engine(family[0], num_blocks=200), prompts(10)) == expected


def test_preemption_and_prefixes(family, expected):
    engine = tiny.make_engine(family[0], num_blocks=14)
    assert generate(engine, prompts(10)) == expected
    assert engine.scheduler.preemptions > 0
    engine = tiny.make_engine(family[0], num_blocks=200)
    assert generate(engine, prompts(10)) == expected == generate(engine, prompts(10))
    assert engine.stats.cached_tokens > 0


def test_drafts(family, expected):
    engine, batch = tiny.make_engine(family[0], num_blocks=200), prompts(10)
    truth = {tuple(prompt): tokens for prompt, tokens in zip(batch, expected, strict=True)}
    engine.speculation = Speculation(Guesses(truth), VerifyEverything(5))
    assert generate(engine, batch) == expected
    stats = engine.speculation.stats()
    assert stats["proposed_tokens"] > stats["accepted_tokens"] > 0


def test_the_cache_holds_an_indexers_keys_once(family):
    shape, config = family[0].kv_shape, family[0].module.config.get_text_config()
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    if hasattr(config, "compress_rates"):
        # A window's keys, which are their own values; entries of 4 and of 64 tokens, and those that are scored.
        dim, own = config.head_dim, config.index_head_dim
        assert shape.token_bytes == 4 * (4 * dim + 2 * (dim + own) // 4 + dim // 32)
        assert [part.size for part in shape.states.parts] == [
            (7, 4 * dim), (7, 4 * own), (63, 2 * dim), (7, 4 * dim), (7, 4 * own)
        ]  # fmt: skip
        return
    found = [layer for layer in shape.layers if (layer.head_dim, layer.shared) == (config.index_head_dim, True)]
    assert len(found) >= kinds.count("full")
    assert shape.layers[-1].head_dim == config.index_head_dim and shape.layers[-1].kv_heads == 1


def test_an_adapter_of_an_indexer_acts_on_texts_of_any_length(family, tmp_path):
    """Beside texts without it, whose answers it does not change."""
    made = type(family[1])
    plain = made.from_pretrained(family[2], dtype=torch.float32, attn_implementation="eager").eval()
    names = {name.rpartition(".")[2] for name, _ in plain.named_modules() if ".indexer." in name}
    targets = sorted(names & {"wq_b", "wk", "weights_proj", "q_b_proj", "kv_proj", "gate_proj"})
    form = LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    folder, batch = make(plain, tmp_path / "adapter", form, 3, strength=0.3), prompts(6)
    changed = PeftModel.from_pretrained(plain, folder).eval()
    wanted = [tiny.reference_tokens(changed, p, NEW_TOKENS, eos_token_id=None) for p in batch]
    bare = [tiny.reference_tokens(family[1], p, NEW_TOKENS, eos_token_id=None) for p in batch]
    assert wanted != bare
    model = load_causal_lm(family[2], dtype="float32", adapters=2)
    model.adapters.put(1, read(model, folder))
    engine = tiny.make_engine(model, num_blocks=200, max_batch_tokens=60)
    for index, prompt in enumerate(batch):
        for adapter in (0, 1):
            root = tiny.ROOT + bytes([adapter])
            request = tiny.make_request(f"{index} {adapter}", prompt, root=root, max_tokens=NEW_TOKENS, ignore_eos=True)
            request.adapter = adapter
            engine.add(request)
    found = tiny.run_all(engine)
    assert [found[f"{i} 0"] for i in range(len(batch))] == bare
    assert [found[f"{i} 1"] for i in range(len(batch))] == wanted
