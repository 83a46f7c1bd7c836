"""Penalties of a whole batch at once equal those of one row after the other."""

import random

import pytest
import torch

from serve_app.engine.penalties import SampleRow, penalise, penalise_row
from serve_app.sampling_params import SamplingParams


def rows_of(rng: random.Random, vocab: int) -> list[SampleRow]:
    rows = []
    for _ in range(rng.randrange(1, 7)):
        params = SamplingParams(
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.7, -0.4]),
            presence_penalty=rng.choice([0.0, 1.1]),
            logit_bias=rng.choice([None, {3: 2.5, vocab - 1: -100.0, vocab + 9: 1.0}]),
        )
        row = SampleRow(params, 5)
        if params.has_penalties:
            row.prompt = [rng.randrange(vocab) for _ in range(rng.randrange(9))]
            row.output = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_equals_row_by_row(seed):
    rng, vocab = random.Random(seed), 40
    rows = rows_of(rng, vocab)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * 3
    expected = logits.clone()
    for index, row in enumerate(rows):
        penalise_row(expected[index], row)
    before = logits.clone()
    # The last token of every other row is known on the device only.
    last = torch.tensor([(row.output or [0])[-1] for row in rows])
    for row in rows[::2]:
        if row.output:
            row.output = [*row.output[:-1], -1]
    torch.testing.assert_close(penalise(logits, rows, last), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)
