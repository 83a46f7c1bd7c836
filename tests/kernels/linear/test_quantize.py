"""Weights in 8 and 4 bits: how close they stay, and that packing loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve_app.kernels.decoder import paired_order, plain_order
from serve_app.kernels.linear.quantize import GROUP, PANEL, Quantized, pack_panels, quantize


def weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_values_are_within_half_a_step(bits, steps):
    # A group without outliers, so that clipping does not pay: every value is at most half a step (and bfloat16) off.
    w = torch.linspace(-1, 1, GROUP).repeat(3, 2) * torch.tensor([[1.0], [0.01], [100.0]])
    error = (quantize(w, bits).dequantize(torch.float32) - w).abs()
    assert (error <= (1.0 / steps + 2**-7) * w.abs().amax(1, keepdim=True)).all()


def test_fewer_bits_cost_more_and_clipping_pays():
    w = weight(64, 512)
    errors = {b: float((quantize(w, b).dequantize(torch.float32) - w).square().mean()) for b in (8, 4)}
    assert errors[8] < 1e-4 < errors[4] < 2e-2
    # The best uniform 15-step quantiser over the whole range would be worse.
    grouped = w.view(64, -1, GROUP)
    step = (grouped.amax(2, keepdim=True) - grouped.amin(2, keepdim=True)) / 15
    plain = ((grouped - grouped.amin(2, keepdim=True)) / step).round() * step + grouped.amin(2, keepdim=True)
    assert errors[4] < float((plain - grouped).square().mean())


@pytest.mark.parametrize("bits", [8, 4])
def test_constant_and_zero_groups_are_kept(bits):
    w = torch.zeros(2, 2 * GROUP)
    w[1] = 0.5
    assert torch.equal(quantize(w, bits).dequantize(torch.float32), w) or bits == 8
    assert (quantize(w, bits).dequantize(torch.float32) - w).abs().max() < 2**-8


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("paired", [False, True])
def test_panels_hold_every_code(bits, paired):
    """Reads the layout back as the header describes it."""
    n, k = (128, 192) if paired else (100, 128)
    codes = quantize(weight(n, k, 5), bits)
    order = paired_order(n // 2) if paired else plain_order(n)
    packed = pack_panels(codes, order).numpy()
    groups = k // GROUP
    size = PANEL * GROUP * bits // 8 + PANEL * (2 if bits == 8 else 4)
    assert packed.size == len(order) // PANEL * groups * size
    blocks = packed.reshape(-1, groups, size)
    for at, row in enumerate(order):
        for g in range(groups):
            block, lane = blocks[at // PANEL, g], at % PANEL
            values = block[: PANEL * GROUP * bits // 8].reshape(-1, PANEL, 4)[:, lane]
            if bits == 4:
                values = np.stack([values & 15, values >> 4], 1)
            scale = torch.from_numpy(block.copy())[PANEL * GROUP * bits // 8 :].view(torch.bfloat16)[lane]
            if row < 0:
                assert scale == 0
                continue
            assert (values.reshape(-1) == codes.codes[row, g * GROUP : (g + 1) * GROUP].numpy()).all()
            assert scale == codes.scale[row, g]


def test_stacked_parts_and_wrong_shapes():
    a, b = quantize(weight(64, 64), 4), quantize(weight(32, 64, 1), 4)
    both = Quantized.stack([a, b]).dequantize(torch.float32)
    assert torch.equal(both, torch.cat([a.dequantize(torch.float32), b.dequantize(torch.float32)]))
    for shape, bits in [((8, 96), 8), ((8, 64), 5)]:
        with pytest.raises(ValueError, match="groups of 64"):
            quantize(torch.zeros(shape), bits)
