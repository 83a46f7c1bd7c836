import json
import math

import pytest
import torch
from safetensors.torch import save

from serve_app.adapters.config import AdapterRefused, read_config
from serve_app.adapters.weights import read_adapter
from tests.adapters.made import PREFIX, config, weights

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 16), "model.layers.1.mlp.down_proj": (16, 8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_are_read_from_bytes_and_from_a_file(dtype, tmp_path):
    data = weights(SHAPES, dtype=dtype)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    for source in (data, tmp_path / "adapter_model.safetensors"):
        found = read_adapter(config(), source)
        assert found.rank == 4 and set(found.deltas) == set(SHAPES)
        for name, (n, k) in SHAPES.items():
            delta = found.deltas[name]
            assert delta.a.shape == (4, k) and delta.b.shape == (n, 4) and delta.scale == 2
            assert delta.a.dtype == (torch.float32 if dtype is torch.float16 else dtype)
    assert found.bytes == sum(4 * (n + k) for n, k in SHAPES.values()) * found.deltas[name].a.itemsize


def test_ranks_and_scales_follow_patterns():
    told = read_config(
        config(
            use_rslora=True,
            rank_pattern={"layers.1.mlp.down_proj": 16, "q_proj": 2},
            alpha_pattern={r"^model\.layers\.\d+\.self_attn.q_proj": 3},
        )
    )
    assert told.rank_of("model.layers.1.mlp.down_proj") == 16
    assert told.rank_of("model.layers.11.mlp.down_proj") == 4
    assert told.rank_of("model.layers.0.self_attn.q_proj") == 2
    assert told.scale_of("model.layers.0.self_attn.q_proj") == pytest.approx(3 / math.sqrt(2))
    assert told.scale_of("model.layers.1.mlp.down_proj") == 2
    assert told.scale_of("model.layers.0.self_attn.k_proj") == 4


REFUSED_CONFIGS = {
    "peft_type": ("LOHA", "peft_type"),
    "use_dora": (True, "use_dora"),
    "bias": ("all", "bias"),
    "lora_bias": (True, "lora_bias"),
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "trainable_token_indices": ([1], "trainable_token_indices"),
    "alora_invocation_tokens": ([1, 2], "alora"),
    "layer_replication": ([[0, 4]], "layer_replication"),
    "init_lora_weights": ("pissa_niter_4", "path_initial_model"),
    "r": (0, "a rank is from 1 to 256"),
    "lora_alpha": ("8", "must be a number"),
    "rank_pattern": ({"(a+)+": 2}, "may take long"),
    "alpha_pattern": ({"[": 2}, "alpha_pattern"),
    "target_modules": (3, "target_modules"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_what_would_be_computed_otherwise_is_refused_by_name(name):
    value, text = REFUSED_CONFIGS[name]
    with pytest.raises(AdapterRefused, match=text):
        read_config(config(**{name: value}))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b" " * (1 << 21), b'{"r": 4}'])
def test_a_configuration_that_is_none_is_refused(data):
    with pytest.raises(AdapterRefused):
        read_config(data)


Q = "model.layers.0.self_attn.q_proj"
A, B = torch.zeros(4, 16), torch.zeros(8, 4)
REFUSED_WEIGHTS = {
    "an embedding": ({f"{PREFIX}model.embed_tokens.lora_embedding_A": A}, "embeddings"),
    "dora": ({f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(8)}, "DoRA"),
    "a bias": ({f"{PREFIX}{Q}.bias": torch.ones(8)}, "bias"),
    "a whole module": ({f"{PREFIX}lm_head.weight": A}, "no A or B"),
    "no B": ({f"{PREFIX}{Q}.lora_A.weight": A}, "lacks"),
    "not finite": ({f"{PREFIX}{Q}.lora_A.weight": A / 0, f"{PREFIX}{Q}.lora_B.weight": B}, "not finite"),
    "integers": ({f"{PREFIX}{Q}.lora_A.weight": A.int(), f"{PREFIX}{Q}.lora_B.weight": B}, "I32; save"),
    "another rank": ({f"{PREFIX}{Q}.lora_A.weight": A[:2], f"{PREFIX}{Q}.lora_B.weight": B[:, :2].clone()}, "rank 4"),
    "one dimension": ({f"{PREFIX}{Q}.lora_A.weight": A[0], f"{PREFIX}{Q}.lora_B.weight": B}, "two sizes"),
    "nothing": ({}, "no weights"),
}


@pytest.mark.parametrize("name", REFUSED_WEIGHTS)
def test_tensors_that_are_no_adapters_of_linears_are_refused_by_name(name):
    tensors, text = REFUSED_WEIGHTS[name]
    with pytest.raises(AdapterRefused, match=text):
        read_adapter(config(), save(tensors))


def test_a_damaged_file_is_refused(tmp_path):
    data = weights(SHAPES)
    for damaged in (b"", data[:100], data[:-1], b"\xff" * 8 + data[8:]):
        with pytest.raises(AdapterRefused, match="upload the whole file"):
            read_adapter(config(), damaged)
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(AdapterRefused, match="upload the whole file"):
            read_adapter(config(), tmp_path / "x")


def test_weights_of_a_module_that_is_no_target_are_refused():
    with pytest.raises(AdapterRefused, match=r"down_proj.*target_modules"):
        read_adapter(config(target_modules=["q_proj"]), weights(SHAPES))
    assert read_adapter(config(target_modules=["q_proj", "down_proj"]), weights(SHAPES)).rank == 4
    assert json.loads(config(target_modules="all-linear"))["target_modules"] == "all-linear"
