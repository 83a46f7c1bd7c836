"""Configurations that say anything at all: a folder is served as transformers computes it, or refused in words."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from serve_app.models.load import load_causal_lm
from serve_app.models.loading import kept
from serve_app.models.loading.folder import UnsupportedModel
from tests import tiny

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "phi3", "mixtral", "gpt2", "gpt_neox")
PROMPTS = [[9, 3, 200], [(7 * i * i + 5) % 250 for i in range(70)]]
NUMBERS = (0, 1, 2, 3, 7, -1, -(2**31), 2**31, 2**63, 10**30, 1.5, -0.5, 0.0, 1e30, "4", "", None, True, [2], {"a": 1})
FIELDS = {
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "max_position_embeddings", "sliding_window", "n_head", "n_layer", "n_embd",
            "n_inner", "num_local_experts", "num_experts_per_tok", "rms_norm_eps", "layer_norm_eps",
            "layer_norm_epsilon", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
            "partial_rotary_factor", "rotary_pct", "original_max_position_embeddings", "rope_theta",
            "max_window_layers", "initializer_range", "pad_token_id",
        ),
        NUMBERS,
    ),
    "layer_types": (
        ["full_attention"] * 3, ["sliding_attention"] * 3, ["chunked_attention"] * 3, ["linear_attention"] * 3,
        [], [5] * 3, "sliding_attention", {"0": "full_attention"},
        ["full_attention", "sliding_attention", "full_attention"]),
    "tie_word_embeddings": (True, False, "no", 5), "use_sliding_window": (True, False, "x"),
    "attention_bias": (True, "x"), "use_cache": ("x", 7), "is_decoder": (False, "x"),
    "torch_dtype": ("float16", "x", 5),
    "hidden_act": ("gelu", "relu", "x", 5), "use_parallel_residual": (False, "x"), "scale_attn_weights": (False, "x"),
}  # fmt: skip
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "su", "", 5, None)
ROPE = {
    "rope_theta": (*NUMBERS, 1e4, 5e5), "factor": (*NUMBERS, 4.0),
    "original_max_position_embeddings": (*NUMBERS, 32, 64),
    "low_freq_factor": (1.0, *NUMBERS), "high_freq_factor": (4.0, *NUMBERS), "attention_factor": (*NUMBERS, 1.2),
    "short_factor": ([1.0] * 8, [1.0] * 16, [1.0] * 3, [], [-1.0] * 8, ["x"] * 8, [[1.0]] * 8, 1.0, None),
    "long_factor": ([2.0] * 8, [2.0] * 16, [2.0] * 3, [], [0.0] * 8, ["x"] * 8, 1.0, None),
    "partial_rotary_factor": (*NUMBERS, 0.5), "beta_fast": (32.0, *NUMBERS), "beta_slow": (1.0, *NUMBERS),
    "mscale": NUMBERS, "mscale_all_dim": NUMBERS, "truncate": (True, False, "x"), "llama_4_scaling_beta": NUMBERS,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {family: tiny.write_checkpoint(place / family, family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "cache_root", lambda: tmp_path / "kernels")


def lies(rng: random.Random) -> dict[str, object]:
    """One to three fields, often those of rotation."""
    told: dict[str, object] = {}
    if rng.random() < 0.4:
        chosen = rng.sample(list(ROPE), rng.randint(1, 5))
        told["rope_parameters"] = {"rope_type": rng.choice(KINDS), "rope_theta": 1e4} | {
            name: rng.choice(ROPE[name]) for name in chosen
        }
    for name in rng.sample(list(FIELDS), rng.randint(0 if told else 1, 2)):
        told[name] = rng.choice(FIELDS[name])
    return told


def examine(path, told: dict[str, object]) -> bool:
    """Whether the folder is served; fails where that is not as transformers computes it."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **told}))
    try:
        model = load_causal_lm(path)
    except UnsupportedModel as reason:
        assert str(path) in str(reason) and len(str(reason)) < 2000
        return False
    engine = tiny.make_engine(model)
    fitting = [prompt for prompt in PROMPTS if len(prompt) + 8 < model.max_model_len]
    for index, prompt in enumerate(fitting):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=6, ignore_eos=True))
    found = tiny.run_all(engine)
    if model.dtype is torch.float32:
        reference = tiny.load_reference(path)
        for index, prompt in enumerate(fitting):
            assert found[str(index)] == tiny.reference_tokens(reference, prompt, 6, eos_token_id=None), told
    return True


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_configuration_is_exact_or_refused(folders, tmp_path, family):
    rng, served = random.Random(family), 0
    for index in range(25):
        told = lies(rng)
        path = shutil.copytree(folders[family], tmp_path / str(index))
        try:
            served += examine(path, told)
        except Exception as error:
            raise AssertionError(f"{family} with {told}: {type(error).__name__}: {error}") from error
        shutil.rmtree(path)
    assert served
