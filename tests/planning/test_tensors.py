import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from serve_app.parallel.stages import stages
from serve_app.planning.cache import layer_caches
from serve_app.planning.formats import read_format
from serve_app.planning.tensors import NoTensors, Tensor, from_headers, read_headers


def test_headers_of_files_are_enough(tmp_path):
    save_file(
        {
            "model.layers.1.mlp.experts.3.gate_proj.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
            "model.layers.1.mlp.experts.3.down_proj.weight_packed": torch.zeros(8, 2, dtype=torch.int32),
            "model.layers.1.mlp.experts.3.down_proj.weight_scale": torch.zeros(8, 1),
        },
        tmp_path / "model.safetensors",
    )
    found = {tensor.name.rpartition(".")[2]: tensor for tensor in read_headers(tmp_path)}
    assert found["weight"] == Tensor("model.layers.1.mlp.experts.3.gate_proj.weight", 32, 64, (8, 4))
    assert found["weight_packed"].values == 128 and found["weight_packed"].bytes == 64
    assert found["weight_scale"].values == 0
    assert {tensor.role for tensor in found.values()} == {"experts"} and found["weight"].layer == 1


def test_a_damaged_header_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(NoTensors, match="damaged"):
        read_headers(tmp_path)
    with pytest.raises(NoTensors, match="F13"):
        from_headers([{"x": {"dtype": "F13", "shape": [1]}}])


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norms"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "latent projections"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "attention"),
        ("model.layers.0.self_attn.indexer.wq_b.weight", "indexers"),
        ("model.layers.0.self_attn.indexer.k_norm.weight", "norms"),
        ("model.layers.0.mlp.gate.weight", "routers"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "experts"),
        ("model.layers.0.block_sparse_moe.input_linear.weight", "experts"),
        ("model.layers.0.shared_mlp.input_linear.weight", "mlp"),
        ("model.layers.0.mamba.in_proj.weight", "attention"),
        ("transformer.h.3.attn.c_attn.weight", "attention"),
        ("vision_model.model.layers.0.self_attn.q_proj.weight", "vision"),
        ("model.something.weight", "others"),
    ],
)
def test_what_a_tensor_is_for(name, role):
    assert Tensor(name, 1, 2).role == role


def test_formats():
    experts, attention = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.q_proj.weight"
    mxfp4 = read_format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert mxfp4.bits == 4.25 and mxfp4.holds(experts, "experts") and not mxfp4.holds(attention, "attention")
    fp8 = read_format({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert fp8.bits == pytest.approx(8, abs=0.01) and fp8.holds(attention, "attention")
    assert not fp8.holds("lm_head.weight", "head")
    # Expressions are about modules, of which some layers may be left out.
    attends = "re:layers\\.(?!(3|7)\\.)\\d+\\.self_attn"
    some = read_format({"quant_method": "fp8", "modules_to_not_convert": ["re:kv_b_proj$", attends]})
    assert not some.holds("model.layers.3.self_attn.kv_b_proj.weight", "attention")
    assert [some.holds(f"model.layers.{i}.self_attn.o_proj.weight", "attention") for i in (2, 3, 7)] == [
        False, True, True]  # fmt: skip
    packed = read_format({
        "quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"],
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
    })  # fmt: skip
    assert packed.bits == 4.5 and packed.holds(experts, "experts") and not packed.holds(attention, "attention")
    assert read_format(None) is None
    with pytest.raises(ValueError, match="strange"):
        read_format({"quant_method": "strange"})


def config(**values):
    text = SimpleNamespace(num_hidden_layers=2, num_attention_heads=8, hidden_size=64, **values)
    return SimpleNamespace(get_text_config=lambda: text)


def test_what_layers_remember():
    grouped = layer_caches(config(num_key_value_heads=2, head_dim=16), 2, latent=True)
    assert [c.token_bytes for c in grouped] == [2 * 2 * 16 * 2] * 2 and grouped[0].rank_bytes(4) == 64
    mixed = layer_caches(config(layer_types=["sliding_attention", "full_attention"], sliding_window=10), 2, latent=True)
    assert mixed[0].text_bytes(100) == 10 * 256 and mixed[1].text_bytes(100) == 100 * 256
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20}
    assert layer_caches(config(**sizes), 2, latent=True)[0].rank_bytes(8) == (32 + 8) * 2
    assert layer_caches(config(**sizes), 2, latent=False)[0].token_bytes == 8 * 2 * 24 * 2
    hybrid = config(layer_types=["linear_attention", "full_attention"])
    state, keys = layer_caches(hybrid, 2, latent=True, states={0: 4096})
    assert state.token_bytes == 0 and state.text_bytes(1) == state.text_bytes(1000) == 4096 and keys.state == 0


def test_stages_hold_as_evenly_as_layers_allow():
    assert stages([1] * 8, 2, (0, 0)) == [(0, 4), (4, 8)]
    assert stages([1] * 8, 2, (4, 0)) == [(0, 2), (2, 8)]
    assert stages([5, 1, 1, 1, 1, 1], 3, (0, 0))[0] == (0, 1)
    assert stages([1, 1, 1], 3, (9, 9)) == [(0, 1), (1, 2), (2, 3)]


def test_published_files_say_where_they_are_from():
    from serve_app.planning.source import PUBLISHED, published

    for file in PUBLISHED.glob("*.json"):
        assert json.loads(file.read_text())["_source"]
    assert all("_source" not in values for values in published().values())
