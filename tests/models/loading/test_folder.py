"""Folders from anywhere: whatever their files say, loading ends with a reason and never with the process."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from serve_app.models.encoders.encoder_load import load_encoder
from serve_app.models.load import load_causal_lm
from serve_app.models.loading import kept
from serve_app.models.loading.folder import UnsupportedModel, contents
from tests import tiny

HUGE = 10**9
WRONG_KINDS = ("3", 3.5, [], {"a": 1}, True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each family that is lied about."""
    root = tmp_path_factory.mktemp("folders")
    names = ("llama", "mistral", "gemma2", "qwen3", "mixtral", "deepseek_v3")
    return {name: tiny.write_checkpoint(root / name, name) for name in names}


@pytest.fixture
def spoil(folders, tmp_path, monkeypatch):
    """A function that copies a family's checkpoint with other fields in its config.json."""
    monkeypatch.setattr(kept, "cache_root", lambda: tmp_path / "kernels")

    def make(family="llama", **fields):
        path = shutil.copytree(folders[family], tmp_path / "model")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fields}))
        return path

    return make


def reason(path, load=load_causal_lm, **options) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        load(path, **options)
    text = str(caught.value)
    assert str(path) in text and len(text) < 2000
    return text


LIES = [
    ("llama", name, value)
    for name, values in {
        "num_hidden_layers": (0, -1, 2, 4, 40, HUGE, 10**30, "3", 3.5, [3], {"a": 1}, True),
        "hidden_size": (0, -64, 32, 63, 128, HUGE, "64", 64.5),
        "intermediate_size": (-1, 0, 64, 1000, 10 * HUGE, "128"),
        "num_attention_heads": (0, -4, 3, 8, 1000 * HUGE, "4", None),
        "num_key_value_heads": (0, -2, 1, 3, 4, HUGE, "2", [2, 2, 2]),
        "head_dim": (0, -16, 1, 8, 32, HUGE, "16"),
        "vocab_size": (0, -1, 100, 257, 1000 * HUGE, "256", False),
        "max_position_embeddings": (0, -5, 10**15, "long", [1024], {"a": 1}),
        "rms_norm_eps": ("small", [1], -1e9),
        "rope_parameters": (
            "llama3", 5, {"rope_type": "nonsense", "rope_theta": 1e4}, {"rope_type": "llama3", "rope_theta": 1e4},
            {"rope_type": "default", "rope_theta": "big"}, {"rope_type": "default", "rope_theta": -2.0},
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}, {"rope_type": "longrope", "rope_theta": 1e4},
        ),
        "hidden_act": ("nonsense", 5, None, ["silu"]),
        "dtype": (5, "float99", "int8", "float64", "complex64", ["bfloat16"], "cuda"),
        "eos_token_id": ("x", [[1]], [None], {"a": 1}, 1.5),
        "architectures": ("LlamaForCausalLM", [5], [None], [], [["LlamaForCausalLM"]], {"a": 1}),
        "model_type": (5, "../llama", "llama.x", "", None, ["llama"]),
        "text_config": ("x", [1], 5),
        "attention_bias": (True,),
        "mlp_bias": (True,),
        "quantization_config": ("x", {"quant_method": "nonsense"}),
    }.items()
    for value in values
] + [
    ("mistral", "sliding_window", "wide"), ("mistral", "sliding_window", -7), ("mistral", "sliding_window", 1.5),
    ("gemma2", "layer_types", ["sliding_attention"]), ("gemma2", "layer_types", ["nonsense"] * 3),
    ("gemma2", "layer_types", ["full_attention"] * 9), ("gemma2", "layer_types", "full_attention"),
    ("gemma2", "query_pre_attn_scalar", "x"), ("gemma2", "query_pre_attn_scalar", -32),
    ("gemma2", "query_pre_attn_scalar", 0), ("gemma2", "attn_logit_softcapping", "x"),
    ("gemma2", "head_dim", 64), ("qwen3", "head_dim", 16), ("qwen3", "num_key_value_heads", 4),
    ("mixtral", "num_local_experts", 0), ("mixtral", "num_local_experts", 3), ("mixtral", "num_local_experts", 8),
    ("mixtral", "num_experts_per_tok", -1), ("mixtral", "num_experts_per_tok", 5), ("mixtral", "intermediate_size", 64),
    ("deepseek_v3", "kv_lora_rank", 0), ("deepseek_v3", "kv_lora_rank", 47), ("deepseek_v3", "kv_lora_rank", 96),
    ("deepseek_v3", "qk_rope_head_dim", 8), ("deepseek_v3", "qk_rope_head_dim", 15),
    ("deepseek_v3", "qk_nope_head_dim", 25), ("deepseek_v3", "v_head_dim", 41), ("deepseek_v3", "n_routed_experts", 8),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "value"), LIES, ids=lambda value: str(value)[:30])
def test_a_configuration_that_lies_is_refused(spoil, family, name, value):
    reason(spoil(family, **{name: value}))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000], ids=range(9)
)
def test_what_is_no_configuration_is_refused(spoil, text):
    path = spoil()
    (path / "config.json").write_bytes(text)
    assert "config.json" in reason(path)
    assert "config.json" in reason(path, load_encoder, task="embeddings")


@pytest.mark.parametrize("spoiled", ["empty", "cut", "header", "text"])
def test_damaged_weights_are_refused(spoil, spoiled):
    path = spoil()
    file = path / "model.safetensors"
    whole = file.read_bytes()
    header = (1 << 62).to_bytes(8, "little")
    file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "header": header, "text": b"not weights"}[spoiled])
    assert "damaged" in reason(path)


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", HUGE), ("vocab_size", 10**12), ("num_hidden_layers", -1), ("dtype", 5)]
)
def test_encoders_are_held_to_the_same(spoil, name, value):
    assert name in reason(spoil(**{name: value}), load_encoder, task="embeddings")


def test_sizes_that_are_plausible_one_by_one_and_not_together(spoil):
    """Each is a dimension that some tensor might have; the weights would take terabytes."""
    path = spoil()
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"].new_zeros(200_000, 1)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.update(hidden_size=204_800, intermediate_size=200_000, vocab_size=200_000)
    (path / "config.json").write_text(json.dumps(config))
    assert "belongs to another model" in reason(path)


def test_contents_are_those_of_the_files(folders):
    found = contents(folders["llama"])
    weights = load_file(folders["llama"] / "model.safetensors")
    assert (found.tensors, found.largest) == (len(weights), 256)
    assert found.elements == sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": 100}, "lm_head.weight is [256, 64], and config.json describes [100, 64] (and 1 more)"),
        ({"hidden_act": "nonsense"}, "'nonsense' is unknown or missing"),
    ],
    ids=["size", "name"],
)
def test_a_refusal_names_what_is_wrong(spoil, fields, said):
    path = spoil(**fields)
    assert said in reason(path)
    assert said.replace("lm_head", "embed_tokens").replace(" (and 1 more)", "") in reason(
        path, load_encoder, task="embeddings"
    )
