"""Ranks read their parts of checkpoints whose weights lie in fewer bits, and answer as one process does with them."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV4ForCausalLM, Kimi_K25ForConditionalGeneration
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from serve_app.kernels.coded import FLOAT4, FLOAT8, Coded
from serve_app.kernels.decoder import decoder_library
from serve_app.models.load import load_causal_lm
from serve_app.models.loading import packed
from serve_app.models.loading.compare import difference, probe
from serve_app.models.loading.folder import UnsupportedModel, class_of
from serve_app.models.loading.packed import format_of, open_files, read_here
from tests import tiny
from tests.packed import float4, float4_pairs, float8, write_deepseek_v4, write_float4, write_float8, write_whole4
from tests.parallel.groups import divided
from tests.parallel.test_divided import NEW_TOKENS, generate, prompts
from tests.variants import some

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}


WHOLE4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}}},
}  # fmt: skip


def opened(folder: Path, tensors: dict[str, torch.Tensor], stack: ExitStack, **described: object):
    save_file(tensors, folder / "model.safetensors")
    return open_files([str(folder / "model.safetensors")], described, torch.float32, stack)


def test_parts_of_floats_of_four_bits(tmp_path):
    """Any part of them, also where it begins within a group."""
    blocks, scales = float4(torch.randn(3, 96, 20, generator=torch.Generator().manual_seed(0)))
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    with ExitStack() as stack:
        found = opened(tmp_path, {"e_blocks": blocks, "e_scales": scales}, stack, quant_method="mxfp4")
        assert list(found) == ["e"] and found["e"].get_shape() == [3, 96, 20]
        for index in (..., (slice(1, 3),), (slice(0, 3), slice(40, 70)), (slice(2, 3), slice(32, 64), slice(5, 6))):
            assert torch.equal(found["e"][index], wanted[index])


def test_parts_of_scaled_blocks(tmp_path):
    """Of blocks of which the last are smaller, of rows with a scale each, and of one scale for all."""
    weight = torch.randn(150, 200, generator=torch.Generator().manual_seed(0))
    codes, scales = float8(weight)
    spread = scales.repeat_interleave(64, 0)[:150].repeat_interleave(64, 1)[:, :200]
    tensors = {"a": codes, "a_scale_inv": scales, "b": codes, "b_scale_inv": scales[:1, :1].expand(150, 1).contiguous()}
    tensors |= {"c": codes, "c_scale_inv": scales[0, 0], "norm": weight[0], "x.activation_scale": scales[0]}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    with ExitStack() as stack:
        found = opened(tmp_path, tensors, stack, quant_method="fp8", weight_block_size=[64, 64])
        assert set(found) == {"a", "b", "c", "norm"}
        for index in (..., (slice(70, 150),), (slice(0, 150), slice(100, 200)), (slice(63, 65), slice(128, 129))):
            assert torch.equal(found["a"][index], (codes.float() * spread)[index])
            assert torch.equal(found["b"][index], (codes.float() * scales[0, 0])[index])
            assert torch.equal(found["c"][index], (codes.float() * scales[0, 0])[index])
        assert torch.allclose(found["a"][...], weight, atol=0.3)
    with ExitStack() as stack, pytest.raises(UnsupportedModel, match=r"c_scale_inv is not there"):
        opened(tmp_path, {"c": codes}, stack, quant_method="fp8")
    with ExitStack() as stack, pytest.raises(UnsupportedModel, match=r"has scales \[4, 4\], which blocks of None"):
        opened(tmp_path, {"c": codes, "c_scale_inv": torch.ones(4, 4)}, stack, quant_method="fp8")["c"][...]


@pytest.mark.parametrize("size", [32, 64])
def test_parts_of_whole_numbers(tmp_path, size):
    """Any part of them, in groups of any size; products are rounded to the scales' dtype."""
    seed = torch.Generator().manual_seed(0)
    numbers = torch.randint(-8, 8, (20, 128), generator=seed)
    scales = torch.rand(20, 128 // size, generator=seed).bfloat16()
    codes = sum((numbers + 8)[:, place::8] << 4 * place for place in range(8))
    codes = torch.where(codes >= 1 << 31, codes - (1 << 32), codes).to(torch.int32)
    stored = {"e.weight_packed": codes, "e.weight_scale": scales, "e.weight_shape": torch.tensor([20, 128])}
    stored |= {"norm.weight": scales[:, 0].clone(), "own_scale": torch.ones(3)}
    wanted = (numbers.bfloat16() * scales.repeat_interleave(size, 1)).float()
    with ExitStack() as stack:
        found = opened(tmp_path, stored, stack, **WHOLE4)
        assert set(found) == {"e.weight", "norm.weight", "own_scale"} and found["e.weight"].get_shape() == [20, 128]
        for index in (..., (slice(3, 20),), (slice(0, 20), slice(40, 70)), (slice(2, 3), slice(96, 128))):
            assert torch.equal(found["e.weight"][index], wanted[index])


def test_columns_in_an_order_of_their_own_are_refused(tmp_path):
    stored = {"e.weight_packed": torch.zeros(2, 8, dtype=torch.int32), "e.weight_scale": torch.ones(2, 2).bfloat16()}
    stored["e.weight_g_idx"] = torch.zeros(64, dtype=torch.int32)
    with ExitStack() as stack, pytest.raises(UnsupportedModel, match="e.weight_g_idx says which columns share a scale"):
        opened(tmp_path, stored, stack, **WHOLE4)


def test_kimi_is_known_by_the_name_that_code_in_its_folder_has(tmp_path):
    tiny.write_small(tmp_path, Kimi_K25ForConditionalGeneration)
    told = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["KimiK25ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert class_of(told, tmp_path) is Kimi_K25ForConditionalGeneration


def test_other_formats_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match="packed as awq, of which several ranks can't read their parts"):
        format_of({"quant_method": "awq"}, Path("here"))
    assert format_of(WHOLE4, Path("here")) == "compressed-tensors"
    for change, told in (
        ({"num_bits": 8}, "num_bits: 8"), ({"symmetric": False}, "symmetric: False"),
        ({"type": "float"}, "type: float"), ({"actorder": "group"}, "actorder: group"),
    ):  # fmt: skip
        other = copy.deepcopy(WHOLE4)
        other["config_groups"]["group_0"]["weights"] |= change
        with pytest.raises(UnsupportedModel, match=f"compressed-tensors with {told}, of which several ranks can't"):
            format_of(other, Path("here"))
        for described, here in ((other, False), (WHOLE4, True)):
            assert read_here({"text_config": {"quantization_config": described}}, torch.device("cpu")) == here


CASES = [
    ("gpt_oss", 2, 1, 1), ("gpt_oss", 4, 1, 1), ("gpt_oss", 2, 1, 2), ("gpt_oss", 1, 2, 1), ("gpt_oss", 2, 2, 1),
    ("glm4_moe", 2, 1, 1), ("glm4_moe", 2, 1, 2), ("glm4_moe", 1, 2, 1), ("kimi_k25", 2, 1, 1), ("kimi_k25", 2, 2, 1),
    ("deepseek_v4", 2, 1, 1), ("deepseek_v4", 2, 1, 2), ("deepseek_v4", 1, 2, 1), ("deepseek_v4", 2, 2, 1),
    ("llama", 2, 1, 1), ("qwen3_moe", 2, 1, 1), ("qwen3_moe", 2, 1, 2), ("qwen3_moe", 2, 2, 1),
]  # fmt: skip


def write_packed(path: Path, family: str) -> Path:
    if family == "gpt_oss":
        return write_float4(path, **SIZES)
    if family == "deepseek_v4":
        return write_deepseek_v4(path, moe_intermediate_size=128)
    if family == "kimi_k25":  # the language model behind what sees
        return write_whole4(path, path / "plain", lambda: tiny.write_small(path, Kimi_K25ForConditionalGeneration))
    if family == "glm4_moe":
        return write_whole4(path, path / "plain", lambda: tiny.write_checkpoint(path, family))
    return write_float8(path, family, **SIZES, **({"moe_intermediate_size": 64} if family == "qwen3_moe" else {}))


@pytest.mark.parametrize("family", ["glm4_moe", "kimi_k25"])
def test_one_process_answers_as_transformers_does_with_what_codes_stand_for(tmp_path, family):
    path = write_packed(tmp_path, family)
    kind = Kimi_K25ForConditionalGeneration if family == "kimi_k25" else AutoModelForCausalLM
    reference = kind.from_pretrained(path / "plain", dtype=torch.float32, attn_implementation="eager").eval()
    wanted = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(3)]
    assert generate(tiny.make_engine(load_causal_lm(path, dtype="float32"), num_blocks=100), prompts(3)) == wanted


def test_one_process_has_the_numbers_of_transformers_own_unpacking(tmp_path):
    """Of fp8 beside four bits, with scales that are powers of two."""
    path = write_packed(tmp_path, "deepseek_v4")
    reference = DeepseekV4ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    wanted = [tiny.reference_tokens(reference, prompt, NEW_TOKENS) for prompt in prompts(3)]
    assert generate(tiny.make_engine(load_causal_lm(path, dtype="float32"), num_blocks=100), prompts(3)) == wanted


def test_codes_of_experts_become_rows_of_codes(tmp_path):
    """As GPUs keep them."""
    path = write_packed(tmp_path, "deepseek_v4")
    files = [str(path / "model.safetensors")]
    described = json.loads((path / "config.json").read_text())["quantization_config"]
    with ExitStack() as stack:
        numbers = open_files(files, described, torch.float32, stack)
        rows = open_files(files, described, torch.float32, stack, FLOAT4)
        names = [name for name in numbers if ".experts." in name]
        assert len(names) == 5 * 4 * 3
        for name in names:
            coded = Coded.of_rows(rows[name][...][None], FLOAT4, torch.float32)
            assert torch.equal(coded[0], numbers[name][...])
            part = rows[name][:, slice(FLOAT4.bytes, 3 * FLOAT4.bytes)]
            found = Coded.of_rows(part[None], FLOAT4, torch.float32)[0]
            assert torch.equal(found, numbers[name][:, slice(32, 96)])


def fused(path: Path) -> Path:
    """Qwen3-MoE with all experts of a layer in one tensor, in fp8 with scales for blocks."""
    write_float8(path, "qwen3_moe", size=128, **SIZES | {"hidden_size": 128}, moe_intermediate_size=128)
    tensors = load_file(path / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        for end, name in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
            each = [[tensors.pop(f"{at}.{i}.{own}_proj.{name}") for own in ("gate", "up", "down")] for i in range(4)]
            tensors[f"{at}.gate_up_proj{end}"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
            tensors[f"{at}.down_proj{end}"] = torch.stack([down for _, _, down in each])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_experts_in_one_tensor_are_known_by_their_scales(tmp_path, monkeypatch):
    """Where experts compute on codes; one process on a CPU would read them without their scales, and says so."""
    path = fused(tmp_path)
    described = json.loads((path / "config.json").read_text())["quantization_config"]
    monkeypatch.setattr(packed, "takes_codes", lambda device: True)
    assert packed.form_of(described, [str(path / "model.safetensors")], torch.device("cpu")) is FLOAT8
    monkeypatch.undo()
    with pytest.raises(UnsupportedModel, match="has scales that nothing reads, .*gate_up_proj_scale_inv"):
        load_causal_lm(path, dtype="float32")


def test_codes_of_four_bits_are_not_guessed_at(tmp_path):
    """With scales that are no powers of two, or packed by the file format itself."""
    codes, scales = float4_pairs(torch.randn(64, 128))
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with (
        ExitStack() as stack,
        pytest.raises(UnsupportedModel, match="stored as I8 with scales as F32; weights of four"),
    ):
        opened(tmp_path, {"e.weight": codes, "e.scale": scales.float()}, stack, **described)
    # What stands beside a plain weight is another thing.
    plain = {"b.weight": torch.ones(4, 4), "b.scale": torch.full((1, 1), 3.0), "e.weight": codes, "e.scale": scales}
    with ExitStack() as stack:
        found = opened(tmp_path, plain, stack, **described)
        assert set(found) == {"b.weight", "b.scale", "e.weight"} and torch.equal(
            found["b.weight"][...], torch.ones(4, 4)
        )


@pytest.mark.parametrize("case", some(CASES), ids=str)
def test_greedy_tokens_are_those_of_one_process(tmp_path, one_thread, case):
    family, tensor, pipeline, whole = case
    path = write_packed(tmp_path, family)
    assert "quantization_config" in json.loads((path / "config.json").read_text())
    alone = load_causal_lm(path, dtype="float32")
    wanted = generate(tiny.make_engine(alone, num_blocks=100), prompts(6))
    with divided(path, tensor, pipeline, expert_parallel=whole, dtype="float32") as found:
        engine = tiny.make_engine(found.model, num_blocks=6, max_batch_tokens=23)
        assert generate(engine, prompts(6)) == wanted
        assert found.lost == []
        # Of files, where weights lie packed; each rank has some of it whole.
        told = [found.model.report, *found.ranks.states()[1:]]
        read, held = ([each[name] for each in told] for name in ("read_bytes", "held_bytes"))
        stored = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
        assert max(read) < 0.85 * stored < sum(read) and sum(read) < sum(held) / 1.5


@pytest.mark.slow
@pytest.mark.skipif(decoder_library() is None, reason="needs a compiler and AVX512_BF16")
@pytest.mark.parametrize("whole", [1, 2])
def test_experts_stay_in_four_bits_on_each_rank(tmp_path, one_thread, monkeypatch, whole):
    path = write_float4(tmp_path, **SIZES)
    monkeypatch.setattr("serve_app.kernels.linear.panels.COMPACT_ABOVE_BYTES", 0)  # of rank 0
    exact, own = tiny.load(path, dtype="float32"), tiny.load(path, dtype="bfloat16")
    truth = probe(exact, exact.forward)
    experts = 2 * 4 * 3 * 128 * 192
    rest = sum(
        weight.numel() for weight in load_file(path / "model.safetensors").values() if weight.is_floating_point()
    )
    with divided(path, 2, expert_parallel=whole, dtype="bfloat16") as found:
        assert found.model.report["weight_bytes"] < experts / 2 * 0.6 + rest * 2
        assert difference(probe(found.model, found.model.forward), truth) < 1.3 * difference(
            probe(own, own.forward), truth
        )
