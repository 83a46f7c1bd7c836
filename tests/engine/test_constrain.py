"""Masks as bits, and what they do to logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve_app.engine.constrain import Mask, forbidden_tokens


def masks(rows: int, words: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-(2**31), 2**31, (rows, words), dtype=np.int64).astype(np.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_are_read_lowest_token_first(device):
    bits = masks(3, 5)
    found = forbidden_tokens(bits, torch.device(device)).cpu()
    assert found.shape == (3, 160) and found.dtype == torch.bool
    for row in range(3):
        for token in range(160):
            assert bool(found[row, token]) == (int(bits[row, token // 32]) >> (token % 32) & 1 == 0)


def test_a_mask_touches_its_rows_alone():
    bits, logits = masks(2, 4), torch.randn(4, 100)
    forbidden = forbidden_tokens(bits, torch.device("cpu"))
    masked = Mask(torch.tensor([1, 3]), forbidden).apply(logits)
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    for index, row in enumerate((1, 3)):
        expected = [-torch.inf if forbidden[index, i] else logits[row, i].item() for i in range(100)]
        assert masked[row].tolist() == expected
    whole = Mask(torch.arange(2), forbidden).apply(logits[:2])
    assert torch.equal(whole == -torch.inf, forbidden[:, :100])
