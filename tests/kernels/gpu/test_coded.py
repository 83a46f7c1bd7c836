"""Experts that stay in few bits: models answer as transformers does with what the codes stand for, in one process and
on ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from serve_app.kernels.coded import FLOAT4, Coded, to_rows
from serve_app.models.decoders import decoder_parts, device
from serve_app.models.load import CausalModel
from serve_app.models.loading.compare import difference, probe
from tests import tiny
from tests.kernels.gpu import interpreting
from tests.packed import float4, write_float4, write_float8, write_whole4
from tests.parallel import groups
from tests.parallel.test_divided import generate, prompts
from tests.variants import some

SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 2}
KINDS = ["float4", "whole4", "float8"]
ASKED = prompts(2, 30)
TOKENS = 5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """A packed one, and one that transformers reads as the same numbers."""
    packed = write_float4(tmp_path_factory.mktemp("float4"), **SIZES)
    coded, plain = tmp_path_factory.mktemp("whole4"), tmp_path_factory.mktemp("plain")
    write_whole4(coded, plain, lambda: tiny.write_checkpoint(coded, "glm4_moe"))
    experts = {"num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
    eight = write_float8(tmp_path_factory.mktemp("float8"), "qwen3_moe", size=128, **experts)
    return {"float4": (packed, packed), "whole4": (coded, plain), "float8": (eight, eight)}


def answers(model: CausalModel) -> list[list[int]]:
    return generate(tiny.make_engine(model, num_blocks=20, max_batch_tokens=23), ASKED, max_tokens=TOKENS)


def wanted(plain: Path) -> list[list[int]]:
    reference = tiny.load_reference(plain)
    return [tiny.reference_tokens(reference, prompt, TOKENS) for prompt in ASKED]


@pytest.mark.parametrize("kind", some(KINDS, "whole4", "float4"))
def test_greedy_tokens_equal_transformers(checkpoints, interpreted, kind) -> None:
    packed, plain = checkpoints[kind]
    model = tiny.load(packed, dtype="float32")
    values = sum(t.numel() for name, t in load_file(plain / "model.safetensors").items() if "experts" in name)
    assert model.report["coded_experts"]
    if kind == "whole4":  # 4.5 bits each instead of 32
        shared = sum(t.numel() for name, t in load_file(plain / "model.safetensors").items() if "shared_exp" in name)
        unpacked = tiny.load(plain, dtype="float32").report["weight_bytes"]
        assert model.report["weight_bytes"] == unpacked - (values - shared) * (32 - 4.5) / 8
    assert answers(model) == wanted(plain)


@pytest.mark.parametrize("kind", some(KINDS, "float4"))
def test_the_fused_layers_compute_on_codes(checkpoints, interpreted, kind) -> None:
    model = tiny.load(checkpoints[kind][0], dtype="float32")
    expected = probe(model, model.forward)
    parts = decoder_parts.read_model(model, lambda: probe(model, model.forward))
    assert device.obstacle(parts, fp8=False, plug=None) is None and parts.mixtures
    assert all(layer.mixture is None or layer.mixture.coded is not None for layer in parts.layers)
    forward, name = device.build_forward(parts, model.max_model_len, model.kv_shape.dtype)
    assert "triton" in name and difference(probe(model, forward), expected) < 1e-4


def test_what_has_adapters_or_is_rounded_is_unpacked(checkpoints, interpreted) -> None:
    packed, _ = checkpoints["float4"]
    for more in ({"adapters": 1}, {"quantization": "int8"}):
        assert "coded_experts" not in tiny.load(packed, dtype="float32", **more).report


CASES = [
    ("float8", 2, 1, 1, 0),
    ("float8", 2, 1, 2, 0),
    ("whole4", 2, 1, 2, 0),
    ("whole4", 2, 1, 2, 1),
    ("float4", 2, 1, 1, 0),
    ("float4", 1, 2, 1, 0),
    ("float4", 2, 2, 2, 0),
]


@pytest.mark.parametrize("case", some(CASES), ids=str)
def test_ranks_hold_their_codes(checkpoints, interpreted, monkeypatch, one_thread, case) -> None:
    """Columns of each expert, whole ones and copies of them, and those of stages."""
    kind, tensor, pipeline, experts, copies = case
    monkeypatch.setattr(groups, "start", interpreting.start)
    packed, plain = checkpoints[kind]
    with groups.divided(
        packed, tensor, pipeline, expert_parallel=experts, expert_copies=copies, dtype="float32"
    ) as running:
        assert running.model.report["coded_experts"]
        assert answers(running.model) == wanted(plain)


def test_a_model_of_which_some_experts_are_plain_is_unpacked(checkpoints, interpreted, tmp_path) -> None:
    packed, plain = checkpoints["whole4"]
    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    tensors, own = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in own if ".layers.1.mlp.experts.2." in name]:
        for part in ("_packed", "_scale", "_shape"):
            del tensors[name + part]
        tensors[name] = own[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = tiny.load(tmp_path, dtype="float32", optimise=False)
    assert "coded_experts" not in model.report and answers(model) == wanted(plain)


@pytest.mark.slow
def test_columns_that_ranks_would_cut_within_a_group_are_unpacked(
    tmp_path, interpreted, monkeypatch, one_thread
) -> None:
    monkeypatch.setattr(groups, "start", interpreting.start)
    packed = write_float4(tmp_path, **SIZES | {"intermediate_size": 32})
    with groups.divided(packed, 2, dtype="float32") as running:
        assert "coded_experts" not in running.model.report
        assert answers(running.model) == wanted(packed)


def test_the_codes_stand_for_what_transformers_unpacks() -> None:
    blocks, scales = float4(torch.randn(3, 96, 20, generator=torch.Generator().manual_seed(0)))
    told = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32).transpose(1, 2)
    coded = Coded.of_rows(to_rows(blocks, scales), FLOAT4, torch.float32)
    assert coded.shape == told.shape and coded.nbytes == told.numel() * 17 // 32
    assert all(torch.equal(coded[expert], told[expert]) for expert in range(3))
    assert torch.equal(coded.outputs(slice(1, None, 2))[2], told[2, 1::2])
