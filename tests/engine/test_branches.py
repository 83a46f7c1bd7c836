"""Requests that share a beginning to the last token: what is computed, what is copied, and that no answer changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve_app.engine.request import Request
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import HistoryModel, answer_alone, collect, make_engine, random_prompt, request
from tests.tiny import ROOT

ONE = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True)
ASKED = (3, 17, 4)


def shared_request(beginning: list[int]) -> Request:
    return Request("shared", list(beginning), len(beginning), ONE, ROOT, prefill_only=True, shared=len(beginning))


def branch(name: str, beginning: list[int], rest: list[int]) -> Request:
    tokens = beginning + rest
    return Request(name, tokens, len(tokens), ONE, ROOT, shared=len(beginning), asked=ASKED)


def check(model: HistoryModel, answer, tokens: list[int]) -> None:
    logits = torch.from_numpy(model.logits(tokens))
    wanted = torch.log_softmax(logits, -1)
    [told] = answer.logprobs
    assert [token for token, _ in told.top] == list(ASKED)
    np.testing.assert_allclose([value for _, value in told.top], wanted[list(ASKED)], rtol=1e-6)
    assert answer.tokens == [int(logits.argmax())]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70, 96])
def test_each_branch_computes_its_own_tokens_alone(length):
    model = HistoryModel()
    engine = make_engine(model)
    beginning = random_prompt(0, length)
    rests = {f"q{i}": random_prompt(10 + i, 3 + i) for i in range(5)}
    engine.add(shared_request(beginning))
    collect(engine)
    before = engine.stats.prompt_tokens
    assert before == length
    for name, rest in rests.items():
        engine.add(branch(name, beginning, rest))
    answers = collect(engine)
    assert engine.stats.prompt_tokens - before == sum(map(len, rests.values()))
    for name, rest in rests.items():
        check(model, answers[name], beginning + rest)
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == 0


def test_a_tail_that_is_gone_is_computed_again():
    """The cache holds so few blocks that others' requests push the beginning out in between."""
    model = HistoryModel()
    engine = make_engine(model, num_blocks=6)
    beginning, rest = random_prompt(1, 70), random_prompt(2, 5)
    engine.add(shared_request(beginning))
    collect(engine)
    engine.add(request("other", random_prompt(3, 150), max_tokens=1))
    collect(engine)
    before = engine.stats.prompt_tokens
    engine.add(branch("q", beginning, rest))
    check(model, collect(engine)["q"], beginning + rest)
    assert engine.stats.prompt_tokens - before > len(rest)


def test_branches_without_places_wait_and_others_go_on():
    """More questions than places and blocks, beside a request that generates."""
    model = HistoryModel()
    engine = make_engine(model, num_blocks=12, max_num_seqs=3, max_batch_tokens=16)
    chat, beginning = random_prompt(4, 40), random_prompt(5, 45)
    engine.add(request("chat", chat, max_tokens=30))
    engine.add(shared_request(beginning))
    rests = {f"q{i}": random_prompt(20 + i, 4) for i in range(9)}
    for name, rest in rests.items():
        engine.add(branch(name, beginning, rest))
    answers = collect(engine)
    assert answers["chat"].tokens == answer_alone(model, chat, request("", chat, max_tokens=30).sampling).tokens
    for name, rest in rests.items():
        check(model, answers[name], beginning + rest)
    engine.scheduler.blocks.check()


def test_another_tenants_tail_is_not_taken():
    model = HistoryModel()
    engine = make_engine(model)
    beginning, rest = random_prompt(6, 50), random_prompt(7, 4)
    engine.add(shared_request(beginning))
    collect(engine)
    other = branch("q", beginning, rest)
    other.root = b"another tenant's root, 32 bytes.."
    before = engine.stats.prompt_tokens
    engine.add(other)
    check(model, collect(engine)["q"], beginning + rest)
    assert engine.stats.prompt_tokens - before == 54
