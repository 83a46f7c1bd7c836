"""Masks as bits, and what they do to logits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from serve_app.engine.constrain import Mask, Masks, mask_bias
from serve_app.engine.step import Scheduled
from tests.engine.fake import request


def masks(rows: int, words: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-(2**31), 2**31, (rows, words), dtype=np.int64).astype(np.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_are_read_lowest_token_first(device):
    bits = masks(3, 5)
    found = mask_bias(bits, torch.device(device)).cpu()
    assert found.shape == (3, 160) and found.dtype == torch.float32
    for row in range(3):
        for token in range(160):
            allowed = int(bits[row, token // 32]) >> (token % 32) & 1
            assert found[row, token] == (0 if allowed else -torch.inf)


def test_a_mask_touches_its_rows_alone():
    bits, logits = masks(2, 4), torch.randn(4, 100)
    bias = mask_bias(bits, torch.device("cpu"))
    masked, whole = logits.clone(), logits[:2].clone()
    Mask([1, 3], bias).apply(masked)
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    for index, row in enumerate((1, 3)):
        expected = [-torch.inf if bias[index, i] else logits[row, i].item() for i in range(100)]
        assert masked[row].tolist() == expected
    Mask([0, 1], bias).apply(whole)
    assert torch.equal(whole == -torch.inf, bias[:, :100] == -torch.inf)


def test_masks_that_had_no_turn_beside_the_forward_pass_are_computed_when_they_are_wanted():
    let_go, threads = threading.Event(), []

    class Grammars:
        def matcher(self, grammar, output=()):
            raise NotImplementedError

        def fill(self, wanted, rows):
            threads.append(threading.current_thread())
            if threads[-1] is not threading.main_thread():
                let_go.wait(60)
            return masks(rows, 4)

    masker, item = Masks(Grammars()), Scheduled(request("x", [1, 2]), 0, 2, 1)
    item.request.constraint = object()
    first, second = (masker.begin([item], torch.device("cpu")) for _ in range(2))
    assert torch.equal(second.mask(torch.device("cpu")).bias, mask_bias(masks(1, 4), torch.device("cpu")))
    assert threading.main_thread() in threads
    let_go.set()
    assert first.mask(torch.device("cpu")).rows == [0] and len(threads) == 2
