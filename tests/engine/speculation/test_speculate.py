"""Drafts change when tokens come, never which: for every kind of proposer and every way of sampling."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from serve_app.engine.blocks import BlockPool
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Draft
from serve_app.engine.speculation.recent import RecentProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import (
    SHAPE,
    HistoryModel,
    answer_alone,
    collect,
    make_engine,
    random_prompt,
    request,
)
from tests.engine.test_sampling import Z_LIMIT, chi_square_z
from tests.variants import some

MODEL = HistoryModel(spread=3.0)
PROMPTS = {str(i): random_prompt(i, 5 + 13 * i) for i in range(6)}
EOS = frozenset({3})

WAYS = {
    "greedy": {"temperature": 0.0},
    "greedy-logprobs": {"temperature": 0.0, "logprobs": 3},
    "sampled": {"temperature": 1.0, "seed": 11},
    "top_p": {"temperature": 0.8, "top_p": 0.7, "top_k": 9, "seed": 12},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "greedy-penalties-logprobs": {"temperature": 0.0, "frequency_penalty": 2.0, "logprobs": 0},
    "bias": {"temperature": 1.0, "logit_bias": {4: 3.0, 9: -100.0}, "seed": 8, "logprobs": 2},
    "stop-ids": {"temperature": 1.0, "stop_token_ids": (5, 9, 14), "ignore_eos": True, "seed": 2},
}


class Drafts:
    """A proposer that makes its drafts from the true continuations."""

    name, free, limit, continues = "drafts", False, 4, False

    def __init__(self, truth: dict[str, list[int]], make) -> None:
        self._truth = truth
        self._make = make
        self._calls = 0
        self._random = random.Random(0)

    def propose(self, requests, count):
        self._calls += 1
        made = {r.id: self._make(self, self._truth[r.id][r.output_len :][:count], count) for r in requests}
        return {name: Draft(tokens) for name, tokens in made.items()}

    def forget(self, request_id):
        pass

    def perfect(self, true, count):
        return true

    def wrong(self, true, count):
        return [(t + 1) % 32 for t in true]

    def half_right(self, true, count):
        return [t if self._random.random() < 0.5 else 0 for t in true]

    def noise(self, true, count):
        return [self._random.randrange(32) for _ in range(self._random.randrange(count + 1))]

    def too_many(self, true, count):
        return true + [1] * 50

    def raises(self, true, count):
        raise ConnectionError("the draft worker is gone")

    def raises_now_and_then(self, true, count):
        if self._calls % 3 == 0:
            raise TimeoutError
        return true


PROPOSERS = {
    name: lambda truth, name=name: Drafts(truth, getattr(Drafts, name))
    for name in ("perfect", "wrong", "half_right", "noise", "too_many", "raises", "raises_now_and_then")
}
PROPOSERS["nothing"] = lambda truth: DraftProposer(lambda queries, count: {})
PROPOSERS["none"] = lambda truth: DraftProposer(lambda queries, count: {q.id: None for q in queries})
PROPOSERS["empty"] = lambda truth: DraftProposer(lambda queries, count: {q.id: [] for q in queries})
PROPOSERS["draft-model-same"] = lambda truth: draft_model(MODEL)
PROPOSERS["draft-model-other"] = lambda truth: draft_model(HistoryModel(salt=1))
PROPOSERS["draft-model-starved"] = lambda truth: draft_model(MODEL, num_blocks=4)


PROPOSERS["ngram"] = lambda truth: NgramProposer()
PROPOSERS["ngram-recent-draft"] = lambda truth: [NgramProposer(limit=2), RecentProposer(), draft_model(MODEL)]
PROPOSERS["ngram-wrong"] = lambda truth: [NgramProposer(limit=1), Drafts(truth, Drafts.wrong)]
PROPOSERS["broken-ngram-draft"] = lambda truth: [Drafts(truth, Drafts.raises), NgramProposer(), draft_model(MODEL)]


# The ones of which any mistake of verifying shows in some way of sampling.
HARD = ("half_right", "raises_now_and_then", "draft-model-other", "draft-model-starved", "ngram-recent-draft")
# With these the controller has something to weigh.
OFTEN = ("half_right", "noise", "raises_now_and_then", "draft-model-other", "ngram", "ngram-recent-draft")


def draft_model(model: HistoryModel, num_blocks: int = 100) -> DraftProposer:
    runner = Runner(model.forward, SHAPE.allocate(num_blocks, "cpu"))
    return DraftProposer(DraftEngine(runner, BlockPool(num_blocks)).propose)


def run(proposer, way: dict, *, controller: SpeculationController | None = None, **options):
    controller = controller or VerifyEverything(4)
    speculation = None if proposer is None else Speculation(proposer, controller)
    engine = make_engine(MODEL, speculation=speculation, eos_token_ids=EOS, **options)
    for name, prompt in PROMPTS.items():
        engine.add(request(name, prompt, **{"max_tokens": 20 + int(name), **way}))
    answers = collect(engine)
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.used_blocks == 0
    return answers, engine


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    params = WAYS[request.param]
    return params, {
        name: answer_alone(MODEL, prompt, SamplingParams(**{"max_tokens": 20 + int(name), **params}), eos=EOS)
        for name, prompt in PROMPTS.items()
    }


@pytest.mark.parametrize("name", some(PROPOSERS, *HARD))
def test_the_output_is_the_same_as_without_drafts(way, name):
    params, alone = way
    proposer = PROPOSERS[name]({n: a.tokens for n, a in alone.items()})
    answers, _ = run(proposer, params)
    assert answers == alone


@pytest.mark.parametrize("name", some(PROPOSERS, *OFTEN))
def test_the_controller_changes_nothing_either(way, name):
    params, alone = way
    proposer = PROPOSERS[name]({n: a.tokens for n, a in alone.items()})
    answers, _ = run(proposer, params, controller=SpeculationController(6))
    assert answers == alone


@pytest.mark.parametrize(
    "name", some(["perfect", "half_right", "draft-model-same", "ngram-recent-draft"], "half_right")
)
@pytest.mark.parametrize("temperature", some([0.0, 1.0], 1.0))
def test_also_where_requests_are_preempted(name, temperature):
    params = {"temperature": temperature, "seed": 3, "max_tokens": 60, "ignore_eos": True, "frequency_penalty": 0.2}
    alone = {n: answer_alone(MODEL, prompt, SamplingParams(**params), eos=EOS) for n, prompt in PROMPTS.items()}
    proposer = PROPOSERS[name]({n: a.tokens for n, a in alone.items()})
    answers, engine = run(proposer, params, num_blocks=8, max_batch_tokens=50)
    assert answers == alone
    assert engine.scheduler.preemptions > 0


def test_perfect_drafts_save_steps_and_wrong_ones_cost_none():
    params = {"temperature": 1.0, "seed": 1, "ignore_eos": True, "max_tokens": 25}
    plain, without = run(None, params)
    truth = {n: a.tokens for n, a in plain.items()}
    _, perfect = run(PROPOSERS["perfect"](truth), params)
    _, wrong = run(PROPOSERS["wrong"](truth), params)
    # The first token comes with the prompt, the other 24 in steps of 1 + 4.
    assert without.stats.steps == wrong.stats.steps == 25
    assert perfect.stats.steps == 6
    assert perfect.speculation.stats()["acceptance_rate"] == 1.0
    assert wrong.speculation.stats()["acceptance_rate"] == 0.0


def test_sampled_tokens_under_drafts_are_distributed_as_the_targets():
    """The joint distribution of three tokens, of which the draft proposes the second and third."""
    model, prompt, count = HistoryModel(vocab=5, spread=1.0), [1, 2, 3], 2500
    params = {"temperature": 1.2, "max_tokens": 4}
    likely = Drafts({}, None)
    likely.propose = lambda requests, n: {r.id: Draft(greedy(model, r.tokens, 2)) for r in requests}
    engine = make_engine(model, num_blocks=300, max_num_seqs=250, speculation=Speculation(likely, VerifyEverything(2)))
    for seed in range(count):
        engine.add(request(str(seed), prompt, seed=seed, **params))
    counts = np.zeros((5, 5, 5), np.int64)
    for answer in collect(engine).values():
        counts[tuple(answer.tokens[:3])] += 1
    expected = np.empty((5, 5, 5))
    for tokens in itertools.product(range(5), repeat=3):
        expected[tokens] = np.prod([probs(model, [*prompt, *tokens[:i]])[tokens[i]] for i in range(3)])
    assert 0.3 < engine.speculation.stats()["acceptance_rate"] < 0.7
    assert chi_square_z(counts.ravel(), expected.ravel()) < Z_LIMIT


def probs(model: HistoryModel, tokens: list[int]) -> np.ndarray:
    return torch.softmax(torch.from_numpy(model.logits(tokens)).double() / 1.2, 0).numpy()


def greedy(model: HistoryModel, tokens: list[int], count: int) -> list[int]:
    return answer_alone(model, tokens, SamplingParams(temperature=0.0, max_tokens=count)).tokens


def test_no_draft_is_longer_than_the_rest_of_the_answer():
    asked: list[int] = []

    class Eager:
        name, free, limit, continues = "eager", True, 16, True

        def propose(self, requests, count):
            return {r.id: Draft([0] * 10) for r in requests}

        def forget(self, request_id):
            asked.append(request_id)

    speculation = Speculation(Eager(), VerifyEverything(4))
    one = request("x", [1], max_tokens=4)
    prefill = request("p", [1], prefill_only=True)
    speculation.before_step([one, prefill], 4096)
    # Three drafts and the token behind them fill max_tokens; a prefill wants none.
    assert (len(one.draft), len(prefill.draft)) == (3, 0)
    one.draft = []
    speculation.before_step([one], 3)
    assert len(one.draft) == 1
    engine = make_engine(MODEL, speculation=speculation)
    engine.add(one)
    collect(engine)
    assert asked == ["x"]


# --- what the draft model is told -----------------------------------------------------------------


class Recorder:
    """A transport that keeps what a draft model would hold and rebuilds it from the queries."""

    def __init__(self):
        self.held: dict[str, list[int]] = {}
        self.sent: list[int] = []
        self.fail = False
        self.calls = 0

    def __call__(self, queries, count, over):
        self.calls += 1
        if self.fail:
            raise ConnectionError
        for name in over:
            del self.held[name]
        answers = {}
        for query in queries:
            self.sent.append(len(query.suffix))
            if query.id not in self.held and query.agreed:
                answers[query.id] = None
                continue
            self.held[query.id] = self.held.get(query.id, [])[: query.agreed] + query.suffix
            draft = [len(self.held[query.id]) % 7] * count
            answers[query.id] = draft
            self.held[query.id] = self.held[query.id] + draft
        return answers


def test_each_token_is_sent_once():
    transport = Recorder()
    proposer = DraftProposer(transport)
    one = request("x", random_prompt(0, 100))
    for new in ([], [2, 2, 2, 9], [9], [0, 1, 2]):
        one.tokens += new
        draft = proposer.propose([one], 4)["x"]
        assert transport.held["x"] == one.tokens + draft.tokens
    # The prompt; then 9 behind the accepted [2, 2, 2]; then only what differed from the drafts.
    assert transport.sent[0] == 100 and sum(transport.sent) < 110


def test_a_forgotten_sequence_is_sent_whole():
    transport = Recorder()
    proposer = DraftProposer(transport)
    one = request("x", random_prompt(0, 100))
    proposer.propose([one], 4)
    one.tokens.append(1)
    transport.held.clear()
    assert proposer.propose([one], 4) == {}
    assert proposer.propose([one], 4) == {"x": Draft([101 % 7] * 4)}
    assert transport.sent[-1] == 101


def test_what_has_ended_is_told_with_the_next_question():
    transport = Recorder()
    proposer = DraftProposer(transport)
    for number in range(5):
        proposer.propose([request(f"q{number}", random_prompt(number, 40))], 4)
        proposer.forget(f"q{number}")
        proposer.forget("never asked about")
    assert set(transport.held) == {"q4"}


def test_after_a_failure_everything_is_sent_again():
    transport = Recorder()
    speculation = Speculation(DraftProposer(transport), VerifyEverything(4))
    one = request("x", random_prompt(0, 50), max_tokens=99)
    one.computed = 49
    for fail in (False, True, True, False):
        one.draft, transport.fail = [], fail
        speculation.before_step([one], 4096)
        assert bool(one.draft) != fail
    assert transport.sent == [50, 50]


def test_steps_in_which_someone_prefills_are_not_measured():
    controller = VerifyEverything(4)
    speculation = Speculation(PROPOSERS["nothing"]({}), controller)
    engine = make_engine(MODEL, speculation=speculation, max_batch_tokens=8)
    engine.add(request("x", [1, 2], max_tokens=30))
    for _ in range(4):
        engine.step()
    assert controller.steps == 3
    engine.add(request("long", random_prompt(0, 60), prefill_only=True))
    engine.step()
    measured = controller.steps
    while len(engine.scheduler.running) == 2:
        engine.step()
    assert controller.steps == measured
    engine.step()
    assert controller.steps == measured + 1


def test_a_draft_model_that_cannot_be_reached_is_not_asked_and_its_failures_are_not_its_price():
    transport, reachable = Recorder(), True
    proposer = DraftProposer(transport, limit=4, reachable=lambda: reachable)
    controller = VerifyEverything(4)
    speculation = Speculation(proposer, controller)
    one = request("x", [1], max_tokens=50)
    transport.fail = True
    for _ in range(3):
        speculation.before_step([one], 4096)
    assert transport.calls == 3
    assert not one.draft and "draft" not in speculation.stats()["proposers"]
    transport.fail, reachable = False, False
    speculation.before_step([one], 4096)
    assert not one.draft and transport.calls == 3
    reachable = True
    speculation.before_step([one], 4096)
    assert len(one.draft) == 4 and speculation.stats()["proposers"]["draft"]["asked"] == 1
