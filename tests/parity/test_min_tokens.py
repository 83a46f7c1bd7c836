"""No answer ends before `min_tokens`, token for token as transformers' `generate` does it."""

from __future__ import annotations

import pytest

from serve_app.engine.gpu.overlap import OverlapEngine
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.speculate import Speculation
from tests import tiny
from tests.variants import some

PROMPT = [5, 9, 14, 5, 9, 14, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("min"), "llama")


@pytest.fixture(scope="module")
def model(folder):
    return tiny.load(folder)


@pytest.mark.parametrize("least", some([0, 1, 2, 5, 16], 0, 5))
@pytest.mark.parametrize("how", ["plain", "speculation", "overlap", "resumed"])
def test_tokens_equal_generate_with_min_new_tokens(folder, model, least, how):
    reference = tiny.load_reference(folder)
    free = tiny.reference_tokens(reference, PROMPT, 16, eos_token_id=None)
    # Something the model says early would end the answer.
    ends = free[1]
    expected = tiny.reference_tokens(reference, PROMPT, 16, eos_token_id=ends, min_new_tokens=least, pad_token_id=0)
    assert len(expected) >= max(least, 2) and ends not in expected[: max(least, 1)]
    options = {"speculation": Speculation(NgramProposer(), VerifyEverything(4))} if how == "speculation" else {}
    engine = tiny.make_engine(model, **options)
    if how == "overlap":
        engine = OverlapEngine(engine.runner, engine.scheduler)
    request = tiny.make_request("r", PROMPT, stop_token_ids=(ends,), min_tokens=least, ignore_eos=True)
    done = 0
    if how == "resumed":
        done = min(least, 1)
        request.tokens += expected[:done]
    engine.add(request)
    found: list[int] = []
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
    assert found == expected[done:]
