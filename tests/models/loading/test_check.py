"""What is found out about a model before it is served."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from serve_app.models import attention
from serve_app.models.load import load_causal_lm
from serve_app.models.loading import check, kept
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.miniature import Sizes, scale_down
from tests import tiny


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "cache_root", lambda: tmp_path / "kernels")
    attention.register()


def test_the_second_start_pays_nothing(monkeypatch):
    config = LlamaConfig(num_key_value_heads=8, sliding_window=None)
    first = check.check(LlamaForCausalLM, config)
    assert (first.differs, first.fused_differs, first.cached) == ("", "", False)
    monkeypatch.setattr(check, "compare", None)
    again = check.check(LlamaForCausalLM, config)
    assert again.cached and again.differs == "" and "known" in again.report()["check"]
    with pytest.raises(TypeError):  # another configuration is compared
        check.check(LlamaForCausalLM, LlamaConfig(num_key_value_heads=4))


def test_other_code_compares_again(monkeypatch):
    config = LlamaConfig(num_key_value_heads=8)
    check.check(LlamaForCausalLM, config)
    monkeypatch.setattr(kept, "code_version", lambda: "another")
    assert not check.check(LlamaForCausalLM, config).cached


@pytest.mark.parametrize("broken", ["scale_down", "Truth"])
def test_what_can_not_be_compared_is_refused_and_not_remembered(monkeypatch, tmp_path, broken):
    def objects(*_):
        raise ValueError("a library is missing")

    path = tiny.write_checkpoint(tmp_path / "model", "llama")
    with monkeypatch.context() as patched:
        patched.setattr(check, broken, objects if broken == "scale_down" else lambda *_: objects)
        with pytest.raises(UnsupportedModel, match="scaled down.*a library is missing"):
            load_causal_lm(path, dtype="float32")
    assert load_causal_lm(path, dtype="float32").report["check"] == "agrees with transformers"


def test_a_wrong_mask_is_seen_and_the_model_refused(monkeypatch):
    """Llama 4's chunks left out, as they once were: only beyond the first chunk anything differs."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    monkeypatch.setattr("serve_app.models.loading.observe._chunk", lambda module, index: 0)
    verdict = check.compare(Llama4ForCausalLM, Llama4TextConfig())
    assert "differs by" in verdict.differs


@pytest.mark.slow
def test_a_scale_by_the_place_in_the_batch_is_seen(monkeypatch):
    """Llama 4's queries without rotation are scaled by their position, which is each request's own."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    assert check.compare(Llama4ForCausalLM, Llama4TextConfig()).differs == ""
    own = attention._temperature
    monkeypatch.setattr(attention, "_temperature", lambda places, *more: own(torch.arange(len(places)), *more))
    assert "differs by" in check.compare(Llama4ForCausalLM, Llama4TextConfig()).differs


def test_a_wrong_rotation_is_seen(monkeypatch):
    monkeypatch.setattr("serve_app.models.longrope.coded", lambda positions, extended: positions * 2)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, "factor": 32.0,
        "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)],
    }  # fmt: skip
    config = Phi3Config(rope_parameters=rope, max_position_embeddings=131072, original_max_position_embeddings=4096)
    assert "differs by" in check.compare(Phi3ForCausalLM, config).differs


@pytest.mark.parametrize("family", ["MiniMax", "RecurrentGemma"])
def test_state_that_is_not_kept_is_refused_by_name(family):
    model_class = getattr(transformers, f"{family}ForCausalLM")
    differs = check.compare(model_class, model_class.config_class()).differs
    assert f"{family}" in differs and "keeps something of a text that is neither" in differs


def test_keys_of_an_indexer_that_are_lost_between_passes_are_seen(monkeypatch):
    """It would choose among the tokens of the pass alone."""
    monkeypatch.setattr("serve_app.models.indexed.write_kv", lambda *_: None)
    assert "differs by" in check.compare(DeepseekV32ForCausalLM, DeepseekV32Config()).differs


def test_entries_that_would_share_a_place_are_refused():
    """At 15 tokens each, those that end with the tokens 224 and 254, which no check comes to."""
    config = DeepseekV4Config(compress_rates={"compressed_sparse_attention": 15, "heavily_compressed_attention": 128})
    assert "entries stand for 15 tokens each" in check.compare(DeepseekV4ForCausalLM, config).differs


@pytest.mark.parametrize("family", ["DeepseekV4", "GlmMoeDsa"])
def test_a_pass_keeps_nothing_of_its_batch(family, tmp_path):
    model = tiny.load(tiny.write_small(tmp_path, getattr(transformers, f"{family}ForCausalLM")))
    engine = tiny.make_engine(model)
    engine.add(tiny.make_request("a", list(range(3, 90)), max_tokens=2))
    tiny.run_all(engine)
    kv = weakref.ref(engine.runner.kv.planes[0])
    del engine
    gc.collect()
    assert kv() is None


@pytest.mark.parametrize("lost", ["_close", "take"])
def test_entries_that_are_not_made_are_seen(monkeypatch, lost):
    monkeypatch.setattr(f"serve_app.models.compressed.Stream.{lost}", lambda *_: None)
    assert "differs by" in check.compare(DeepseekV4ForCausalLM, DeepseekV4Config()).differs


def test_a_state_that_is_lost_between_passes_is_seen(monkeypatch):
    """Each token and each piece of a text would begin anew."""
    monkeypatch.setattr("serve_app.models.stateful.TextStates.get_recurrent_state", lambda *_, **__: None)
    config = Qwen3NextConfig(num_hidden_layers=4)
    assert "differs by" in check.compare(Qwen3NextForCausalLM, config).differs


def test_scaling_down_keeps_kinds_of_layers_and_thresholds():
    from transformers import Gemma3TextConfig

    small = scale_down(Gemma3TextConfig(), Sizes(window=24))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"} and small.sliding_window == 24
    assert small.hidden_size == 128 and small.vocab_size == 260


@pytest.mark.parametrize(("window", "small"), [(4096, 24), (131072, 256), (262144, 256)])
def test_a_window_as_long_as_the_context_stays_that_long(window, small):
    """Phi-3.5-MoE has one, in its masks alone."""
    config = PhimoeConfig(sliding_window=window, max_position_embeddings=131072)
    assert scale_down(config, Sizes(window=24, context=256)).sliding_window == small


def test_a_model_whose_masks_alone_have_a_window_is_served_where_it_ends_beyond_every_text():
    wide, narrow = (PhimoeConfig(sliding_window=n, max_position_embeddings=131072) for n in (131072, 4096))
    assert check.compare(PhimoeForCausalLM, wide).differs == ""
    assert "differs by" in check.compare(PhimoeForCausalLM, narrow).differs


@pytest.mark.slow
def test_a_part_of_the_head_is_rotated_in_the_small_copy_as_well():
    """Mistral 4's configuration says how large it is by a factor of sizes that change."""
    assert check.compare(Mistral4ForCausalLM, Mistral4Config()).differs == ""


@pytest.fixture
def spoiled(tmp_path):
    """A checkpoint and a function that loads it with another configuration."""
    path = tiny.write_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=False)

    def load(**fields):
        config = json.loads((path / "config.json").read_text())
        config.update(fields)
        (path / "config.json").write_text(json.dumps(config))
        return load_causal_lm(path, dtype="float32")

    return path, load


@pytest.mark.parametrize(
    "lie",
    [
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 5},
        {"vocab_size": 300},
        {"vocab_size": 100},
        {"head_dim": 32},
        {"head_dim": 8},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 3},
        {"hidden_size": 32},
        {"intermediate_size": 64},
    ],
    ids=str,
)
def test_a_configuration_that_lies_is_refused(spoiled, lie):
    with pytest.raises(UnsupportedModel):
        spoiled[1](**lie)


def test_missing_weights_are_never_made_up(spoiled):
    path, load = spoiled
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="up_proj"):
        load()


@pytest.mark.slow
def test_texts_that_outgrow_their_rotation_are_computed_anew(tmp_path):
    """Against generate, beside short texts, across the original length and from the prefix cache."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * i for i in range(8)],
    }  # fmt: skip
    path = tiny.write_checkpoint(
        tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=256
    )
    reference, model = tiny.load_reference(path), tiny.load(path)
    assert (model.extend_at, model.recompute) == (64, True)
    engine = tiny.make_engine(model, num_blocks=60, max_batch_tokens=48)
    engine.scheduler.extend_at, engine.scheduler.recompute = model.extend_at, model.recompute
    prompts = [[(7 * i + n) % 250 + 3 for i in range(n)] for n in (5, 58, 63, 64, 65, 150)]
    wanted = {str(i): tiny.reference_tokens(reference, p, 12) for i, p in enumerate(prompts)}
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            engine.add(tiny.make_request(str(index), prompt, max_tokens=12, ignore_eos=True))
        got = tiny.run_all(engine)
        assert {k: v[: len(wanted[k])] for k, v in got.items()} == wanted
        engine.scheduler.blocks.check()
    assert engine.stats.cached_tokens > 0
