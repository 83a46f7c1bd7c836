"""Ranks read their parts of checkpoints whose weights lie in fewer bits, and answer as one process does with them."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from serve_app.kernels.decoder import decoder_library
from serve_app.models.load import load_causal_lm
from serve_app.models.loading.compare import difference, probe
from serve_app.models.loading.folder import UnsupportedModel
from serve_app.models.loading.packed import format_of, open_files
from tests import tiny
from tests.packed import float4, float8, write_float4, write_float8
from tests.parallel.groups import divided
from tests.parallel.test_divided import generate, prompts
from tests.variants import some

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 2}


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


def test_other_formats_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match="packed as awq, of which several ranks can't read their parts"):
        format_of({"quant_method": "awq"}, Path("here"), torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="read on CPUs alone"):
        format_of({"quant_method": "fp8"}, Path("here"), torch.device("cuda"))


CASES = [
    ("gpt_oss", 2, 1, 1), ("gpt_oss", 4, 1, 1), ("gpt_oss", 2, 1, 2), ("gpt_oss", 1, 2, 1), ("gpt_oss", 2, 2, 1),
    ("llama", 2, 1, 1), ("qwen3_moe", 2, 1, 1), ("qwen3_moe", 2, 1, 2), ("qwen3_moe", 2, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", some(CASES), ids=str)
def test_greedy_tokens_are_those_of_one_process(tmp_path, one_thread, case):
    family, tensor, pipeline, whole = case
    more = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    path = write_float4(tmp_path, **SIZES) if family == "gpt_oss" else write_float8(tmp_path, family, **SIZES, **more)
    assert "quantization_config" in json.loads((path / "config.json").read_text())
    alone = load_causal_lm(path, dtype="float32")
    wanted = generate(tiny.make_engine(alone, num_blocks=100), prompts(6))
    with divided(path, tensor, pipeline, expert_parallel=whole, dtype="float32") as found:
        engine = tiny.make_engine(found.model, num_blocks=6, max_batch_tokens=23)
        assert generate(engine, prompts(6)) == wanted
        assert found.lost == []


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
