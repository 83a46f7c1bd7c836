"""Three positions a token: the numbers that transformers gives a whole prompt, whatever part of it a step computes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from serve_app.engine.positions import place
from serve_app.engine.request import EmbeddedSpan, Request
from serve_app.engine.step import Scheduled, build_batch
from serve_app.sampling_params import SamplingParams
from tests import tiny

PICTURE = 3


def never() -> torch.Tensor:
    raise AssertionError("nobody asks for what it looks like")


def made(seed: int) -> tuple[list[int], list[EmbeddedSpan], torch.Tensor]:
    """A prompt, its pictures, and their grids as transformers has them, in patches of which 2 by 2 are merged."""
    dice = random.Random(seed)
    tokens, spans, grids = [], [], []
    for _ in range(dice.randrange(5)):
        tokens += [7] * dice.randrange(1, 30)
        rows, columns = dice.randrange(1, 9), dice.randrange(1, 9)
        count = rows * columns
        spans.append(EmbeddedSpan(len(tokens), count, b"x", never, grid=(rows, columns)))
        grids.append([1, 2 * rows, 2 * columns])
        tokens += [PICTURE] * count
    return tokens + [7] * dice.randrange(1, 30), spans, torch.tensor(grids)


def theirs(tokens: list[int], grids: torch.Tensor) -> tuple[np.ndarray, int]:
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    ids = torch.tensor([tokens])
    found, moved = model.get_rope_index(ids, (ids == PICTURE).int(), grids if len(grids) else None)
    return found[:, 0].numpy(), int(moved)


@pytest.mark.parametrize("seed", range(12))
def test_numbers_are_those_of_transformers_in_any_pieces(seed):
    tokens, spans, grids = made(seed)
    wanted, moved = theirs(tokens, grids)
    for begin, end in [(0, len(tokens)), *((i, i + 1) for i in range(len(tokens)))]:
        found, apart = place(spans, begin, end - begin)
        np.testing.assert_array_equal(found, wanted[:, begin:end])
        assert apart == any(s.start < end and begin < s.end for s in spans)
    # Tokens that are generated go on behind the furthest.
    behind, apart = place(spans, len(tokens) + 5, 3)
    np.testing.assert_array_equal(behind, np.tile(np.arange(3) + len(tokens) + 5 + moved, (3, 1)))
    assert not apart


def request(tokens: list[int], spans: list[EmbeddedSpan]) -> Request:
    found = Request("x", tokens, len(tokens), SamplingParams(), b"")
    found.embedded, found.blocks = spans, list(range(1, 2 + len(tokens) // 32))
    return found


def test_a_batch_has_each_requests_own(tmp_path):
    kv = tiny.load(tiny.write_checkpoint(tmp_path, "llama")).kv_shape.allocate(20, "cpu")
    values = torch.zeros(12, 64)
    tokens, spans = [7] * 50, [EmbeddedSpan(5, 12, b"x", lambda: values, grid=(3, 4))]
    asked, plain = request(tokens, spans), request([7] * 40, [])
    batch = build_batch([Scheduled(plain, 10, 3, 1), Scheduled(asked, 15, 5, 1), Scheduled(plain, 39, 1, 1)], kv)
    assert batch.axes is not None and batch.axes.tolist() == [
        [10, 11, 12, 5, 5, 9, 10, 11, 39], [10, 11, 12, 7, 7, 9, 10, 11, 39], [10, 11, 12, 7, 8, 9, 10, 11, 39],
    ]  # fmt: skip
    # Where K/V lie is a matter of the token's number.
    assert (batch.slots % 32).tolist() == [10, 11, 12, 15, 16, 17, 18, 19, 7]
    # Beyond its picture a request is like any other; it only stands elsewhere.
    batch = build_batch([Scheduled(asked, 49, 1, 1), Scheduled(plain, 39, 1, 1)], kv)
    assert batch.axes is None and batch.positions.tolist() == [41, 39] and batch.slots.tolist()[0] % 32 == 17
    batch = build_batch([Scheduled(plain, 0, 40, 1)], kv)
    assert batch.axes is None and batch.positions.tolist() == list(range(40))
