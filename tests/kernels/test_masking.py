"""Bits that forbid, applied to logits by the compiled kernel and by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve_app.kernels import masking
from serve_app.kernels.library import native
from serve_app.kernels.library.load import cpu_library
from serve_app.kernels.masking import mask_logits

SIDES = ["kernel", "torch", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(rows: int, words: int) -> np.ndarray:
    bits = np.random.default_rng(words).integers(-(2**31), 2**31, (rows, words), dtype=np.int64).astype(np.int32)
    # Words that forbid all or nothing are common.
    bits[0, ::3], bits[0, 1::3] = -1, 0
    return bits


@pytest.fixture(params=SIDES)
def device(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(masking, "cpu_library", lambda: None)
    elif request.param == "kernel" and cpu_library() is None:
        pytest.skip("no compiled kernels here")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 8192, 300_001])
@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 1]])
def test_a_zero_forbids_in_its_row_alone(device, vocab, rows):
    logits = torch.randn(3 if len(rows) == 3 else 5, vocab)
    logits[1, 0], logits[1, -1] = torch.nan, torch.inf
    bits = drawn(len(rows), -(-vocab // 32) + 1)
    expected = logits.clone()
    for index, row in enumerate(rows):
        for token in range(min(vocab, 8192)) if vocab < 10_000 else (0, 1, 31, 32, 150_000, 299_999, 300_000):
            if not int(bits[index, token // 32]) >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    masked = logits.to(device)
    mask_logits(masked, rows, bits)
    masked = masked.cpu()
    seen = slice(None) if vocab < 10_000 else [0, 1, 31, 32, 150_000, 299_999, 300_000]
    assert torch.equal(masked[:, seen].nan_to_num(7.0), expected[:, seen].nan_to_num(7.0))


def test_logits_that_lie_apart_are_masked_where_they_lie():
    wide = torch.zeros(2, 128)
    mask_logits(wide[:, :64], [1], np.zeros((1, 2), np.int32))
    assert torch.equal(wide[1], torch.cat([torch.full((64,), -torch.inf), torch.zeros(64)])) and not wide[0].any()


def test_a_mask_of_fewer_tokens_than_there_are_logits_is_refused():
    if (library := cpu_library()) is None:
        pytest.skip("no compiled kernels here")
    with pytest.raises(ValueError, match="a mask of 32 tokens for 33 logits"):
        native.mask_logits(library, torch.zeros(1, 33), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32))
