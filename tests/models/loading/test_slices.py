"""Bytes that are read of files are counted as they lie there."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from safetensors.torch import save_file

from serve_app.models.loading.packed import open_files
from serve_app.models.loading.slices import Tally, open_slices
from tests.packed import float4, float8


def test_what_is_asked_for_is_counted(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(8, 6), "b": torch.zeros(4, dtype=torch.bfloat16)}, file)
    tally = Tally()
    with ExitStack() as opened:
        found = open_slices([str(file)], opened, tally)
        assert (found["a"].get_shape(), found["b"].get_dtype(), tally.bytes) == ([8, 6], "BF16", 0)
        assert found["a"][2:4, :3].shape == (2, 3)
        assert tally.bytes == 2 * 3 * 4
        assert found["b"][...].shape == (4,)
        assert tally.bytes == 2 * 3 * 4 + 4 * 2


def test_packed_weights_are_counted_packed(tmp_path):
    """Codes and scales, and not the numbers that they stand for."""
    blocks, exponents = float4(torch.randn(3, 64, 20))
    codes, scales = float8(torch.randn(128, 128))
    for described, stored, name, index, size in (
        ({"quant_method": "mxfp4"}, {"e_blocks": blocks, "e_scales": exponents}, "e", slice(1, 2), 20 * 2 * (16 + 1)),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]}, {"w": codes, "w_scale_inv": scales}, "w",
            slice(0, 64), 64 * 128 + 2 * 4,
        ),
    ):  # fmt: skip
        file = tmp_path / f"{name}.safetensors"
        save_file(stored, file)
        tally = Tally()
        with ExitStack() as opened:
            found = open_files([str(file)], described, torch.float32, opened, tally=tally)[name][index]
        assert tally.bytes == size < found.nbytes / 3
