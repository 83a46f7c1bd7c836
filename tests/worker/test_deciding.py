"""Questions about one text on real engines: the log-probabilities are those of transformers' logits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import pytest_asyncio
import torch

from serve_app.wire.decide import Branch, DecideCall, Decided
from serve_app.wire.generate import AdapterAt, Failed
from tests import tiny
from tests.variants import some
from tests.waiting import until
from tests.worker.world import SALT, MemoryPool, start

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()
ASKED = (5, 9, 200, 31)


@pytest.fixture(scope="module", params=some(["llama", "gemma2"], "gemma2"))
def model(request, tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("deciding") / request.param, request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def work(model):
    made = start(model, "decode", MemoryPool())
    yield made
    await until(lambda: not len(made.requests) and not made.stats().numbers["used_blocks"])
    await made.aclose()


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def asking(shared: list[int], rests: list[list[int]], **more) -> DecideCall:
    def packed(ids) -> bytes:
        return np.array(ids, np.int32).tobytes()

    branches = tuple(Branch(packed(rest), packed(ASKED)) for rest in rests)
    return DecideCall(f"decide-{next(_numbers)}", packed(shared), branches, SALT, **more)


async def test_they_are_transformers_logits(model, work):
    reference = tiny.load_reference(model)
    shared, rests = tokens(1, 77), [tokens(10 + i, 2 + 3 * i) for i in range(8)]
    told = await work.decide(asking(shared, rests))
    assert isinstance(told, Decided) and told.cached == 0
    for rest, raw in zip(rests, told.logprobs, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([shared + rest])).logits[0, -1].log_softmax(-1)[list(ASKED)]
        np.testing.assert_allclose(np.frombuffer(raw, np.float32), wanted, atol=2e-4)
    before = work.stats().numbers["prompt_tokens"]
    again = await work.decide(asking(shared, rests[:2]))
    # All whole blocks; and the rest where the pool has it by then.
    assert isinstance(again, Decided) and again.cached in (64, 76)
    for first, second in zip(told.logprobs, again.logprobs, strict=False):
        np.testing.assert_allclose(np.frombuffer(first, np.float32), np.frombuffer(second, np.float32), atol=2e-4)
    # What was left of the beginning, and what is each question's own.
    assert work.stats().numbers["prompt_tokens"] - before == 77 - again.cached + 2 + 5


async def test_one_that_cannot_run_fails_the_call_and_leaves_nothing(work):
    told = await work.decide(asking(tokens(2, 40), [tokens(3, 4), tokens(4, 5000)]))
    assert isinstance(told, Failed) and told.refused
    refused = await work.decide(asking(tokens(2, 40), [tokens(3, 4)], adapter=AdapterAt("0" * 64, 1)))
    assert isinstance(refused, Failed) and refused.refused
