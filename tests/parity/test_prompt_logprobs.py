"""Log-probabilities of prompts equal those of transformers' own forward pass, however the prompt was computed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from serve_app.engine.engine import Engine
from serve_app.engine.gpu.overlap import OverlapEngine
from serve_app.engine.kv_io.transfer import ChunkExporter
from serve_app.sampling_params import PromptLogprobs
from tests import tiny
from tests.variants import some

LENGTHS = (1, 2, 33, 64, 150)
TOP = 3


@pytest.fixture(scope="module", params=some(["llama", "gemma2"], "gemma2"))
def family(request, tmp_path_factory):
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param)
    return tiny.load(path), tiny.load_reference(path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 256) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(family, prompts) -> list[torch.Tensor]:
    """[tokens, vocabulary] each."""
    with torch.no_grad():
        return [torch.log_softmax(family[1](torch.tensor([p])).logits[0].float(), -1) for p in prompts]


def score(engine: Engine, prompts: list[list[int]], max_tokens: int = 3) -> list[PromptLogprobs]:
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=max_tokens, prompt_logprobs=TOP))
    found: dict[str, PromptLogprobs] = {}
    while engine.has_work:
        for output in engine.step():
            assert (output.prompt_logprobs is not None) == (output.finish_reason is not None)
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == 0
    return [found[str(index)] for index in range(len(prompts))]


def check(found: list[PromptLogprobs], prompts: list[list[int]], expected: list[torch.Tensor]) -> None:
    for told, prompt, rows in zip(found, prompts, expected, strict=True):
        own = np.frombuffer(told.logprobs, np.float32)
        assert len(own) == len(prompt) - 1
        if not len(own):
            continue
        wanted = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
        np.testing.assert_allclose(own, wanted[:, 0], atol=2e-5)
        assert np.frombuffer(told.ranks, np.int32).tolist() == ((rows[:-1] > wanted).sum(-1) + 1).tolist()
        best, ids = rows[:-1].topk(TOP, -1)
        np.testing.assert_allclose(np.frombuffer(told.top_logprobs, np.float32).reshape(-1, TOP), best, atol=2e-5)
        assert np.frombuffer(told.top_ids, np.int32).reshape(-1, TOP).tolist() == ids.tolist()
        # The most likely token has the very number that stands for it among the likeliest.
        first = np.frombuffer(told.ranks, np.int32) == 1
        assert (own[first] == np.frombuffer(told.top_logprobs, np.float32).reshape(-1, TOP)[first, 0]).all()


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 23}], ids=["whole", "chunks"])
@pytest.mark.parametrize("rows", [1000, 17])
def test_together(family, prompts, expected, options, rows) -> None:
    engine = tiny.make_engine(family[0], num_blocks=64, **options)
    engine.scheduler.score_rows = rows
    check(score(engine, prompts), prompts, expected)


def test_those_that_lose_their_place_go_on_where_they_were(family, prompts, expected) -> None:
    """The second of two long prompts is preempted in the middle."""
    engine = tiny.make_engine(family[0], num_blocks=9, max_batch_tokens=40)
    check(score(engine, [*prompts, prompts[-2]], max_tokens=60), [*prompts, prompts[-2]], [*expected, expected[-2]])
    assert engine.scheduler.preemptions > 0


def test_what_is_cached_is_computed_again_for_them_and_for_nobody_else(family, prompts, expected) -> None:
    engine = tiny.make_engine(family[0], num_blocks=64)
    check(score(engine, prompts), prompts, expected)
    computed = engine.stats.prompt_tokens
    check(score(engine, prompts), prompts, expected)
    assert engine.stats.prompt_tokens == 2 * computed and engine.stats.cached_tokens == 0
    engine.add(tiny.make_request("x", prompts[-1], max_tokens=1))
    tiny.run_all(engine)
    assert engine.stats.cached_tokens == len(prompts[-1]) // 32 * 32


def test_no_step_has_more_rows_of_logits_than_allowed(family, prompts) -> None:
    engine = tiny.make_engine(family[0], num_blocks=64)
    engine.scheduler.score_rows = 10
    forward, most = engine.runner.forward, 0

    def watched(batch):
        nonlocal most
        most = max(most, len(batch.sample_rows))
        return forward(batch)

    engine.runner.forward = watched
    score(engine, prompts)
    assert 10 <= most <= 10 + len(prompts)


def test_beside_others_and_on_an_engine_that_runs_ahead(family, prompts, expected) -> None:
    """The others get what they get alone."""
    plain = tiny.make_engine(family[0], num_blocks=64)
    plain.add(tiny.make_request("plain", prompts[2], max_tokens=12))
    alone = tiny.run_all(plain)["plain"]
    engine = OverlapEngine(plain.runner, tiny.make_engine(family[0], num_blocks=64).scheduler)
    engine.add(tiny.make_request("plain", prompts[2], max_tokens=12))
    engine.step()
    tokens: list[int] = []
    for index, prompt in enumerate(prompts):
        engine.add(tiny.make_request(str(index), prompt, max_tokens=3, prompt_logprobs=TOP))
    found = {}
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids if output.request_id == "plain" else []
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
    assert tokens == alone
    check([found[str(index)] for index in range(len(prompts))], prompts, expected)


def test_stored_keys_and_values_are_left_aside(family, prompts, expected) -> None:
    from tests.parity.test_generate import stored_prefix

    chunks: list = []
    engine = tiny.make_engine(family[0], num_blocks=64)
    engine.exporter = ChunkExporter(engine.runner.kv, lambda _, meta, data: chunks.append((meta, data())))
    engine.add(tiny.make_request("p", prompts[-1][:-1], prefill_only=True), held=0)
    tiny.run_all(engine)
    other = tiny.make_engine(family[0], num_blocks=64)
    request = tiny.make_request("0", prompts[-1], max_tokens=1, prompt_logprobs=TOP)
    other.add(request, stored_prefix(family[0], chunks))
    [output] = [o for o in iter_steps(other) if o.finish_reason]
    assert output.cached == 0
    check([output.prompt_logprobs], prompts[-1:], expected[-1:])


def iter_steps(engine: Engine):
    while engine.has_work:
        yield from engine.step()
