"""The draft model's server: what it keeps, takes back and forgets."""

from __future__ import annotations

import pytest

from serve_app.engine.blocks import BlockPool
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftQuery
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import SHAPE, HistoryModel, answer_alone, random_prompt

MODEL = HistoryModel()


class Counting:
    """A draft engine, its blocks, and how many tokens each forward pass computed."""

    def __init__(self, num_blocks: int = 64, **options) -> None:
        self.passes: list[int] = []
        self.blocks = BlockPool(num_blocks)
        self.engine = DraftEngine(Runner(self.forward, SHAPE.allocate(num_blocks, "cpu")), self.blocks, **options)

    def forward(self, batch):
        self.passes.append(len(batch.input_ids))
        return MODEL.forward(batch)

    def ask(self, name: str, agreed: int, suffix: list[int], count: int = 4):
        return self.engine.propose([DraftQuery(name, agreed, suffix)], count)[name]


def greedy(tokens: list[int], count: int = 4) -> list[int]:
    return answer_alone(MODEL, tokens, SamplingParams(temperature=0.0, max_tokens=count)).tokens


def test_a_new_sequence_is_continued_greedily():
    server = Counting()
    prompt = random_prompt(0, 70)
    assert server.ask("x", 0, prompt) == greedy(prompt)
    assert server.passes == [70, 1, 1, 1]


def test_only_what_is_new_is_computed():
    server = Counting()
    prompt = random_prompt(0, 70)
    draft = server.ask("x", 0, prompt)
    server.passes.clear()
    # All four stood and the target added one: the last draft's K/V were never computed, nor was the new token's.
    tokens = [*prompt, *draft, 9]
    assert server.ask("x", 74, [9]) == greedy(tokens)
    assert server.passes == [2, 1, 1, 1]


def test_what_has_ended_leaves_its_blocks():
    server = Counting()
    for number in range(9):
        over = [f"q{number - 1}"] if number else []
        server.engine.propose([DraftQuery(f"q{number}", 0, random_prompt(number, 70))], 4, over)
    assert server.engine.sequences == 1 and server.blocks.used_blocks == 3


@pytest.mark.parametrize("stood", [0, 1, 2, 3, 4])
def test_rejected_drafts_are_rolled_back(stood):
    server = Counting()
    prompt = random_prompt(0, 62)  # the drafts cross a block border
    draft = server.ask("x", 0, prompt)
    other = (draft[stood] + 1) % 32 if stood < 4 else 5
    tokens = [*prompt, *draft[:stood], other]
    assert server.ask("x", 62 + stood, [other]) == greedy(tokens)
    # And once more from there, so that a stale K/V would show.
    assert server.ask("x", len(tokens), [1, 2]) == greedy([*tokens, 1, 2])


def test_the_same_question_twice_has_the_same_answer():
    server = Counting()
    prompt = random_prompt(0, 40)
    first = server.ask("x", 0, prompt)
    assert server.ask("x", 40, []) == first
    assert server.ask("x", 0, prompt) == first


def test_what_was_sent_whole_again_replaces_what_was_held():
    server = Counting()
    server.ask("x", 0, random_prompt(0, 90))
    other = random_prompt(1, 20)
    assert server.ask("x", 0, other) == greedy(other)


def test_an_unknown_sequence_is_asked_for_in_full():
    server = Counting()
    prompt = random_prompt(0, 50)
    assert server.ask("x", 49, prompt[49:]) is None
    assert server.ask("x", 0, prompt) == greedy(prompt)
    # More agreed than is held: the two have lost each other.
    assert server.ask("x", 60, [1]) is None
    assert server.engine.sequences == 0 and server.blocks.used_blocks == 0
    assert server.ask("x", 0, prompt) == greedy(prompt)


def test_forget_frees_the_blocks():
    server = Counting()
    server.ask("x", 0, random_prompt(0, 50))
    server.engine.forget("x")
    server.engine.forget("never seen")
    server.blocks.check()
    assert (server.engine.sequences, server.blocks.used_blocks) == (0, 0)
    assert server.ask("x", 50, [1]) is None


def test_the_longest_idle_sequence_makes_room():
    server = Counting(num_blocks=7)
    prompts = {name: random_prompt(ord(name), 60) for name in "abcd"}
    for name in "abc":
        assert server.ask(name, 0, prompts[name]) == greedy(prompts[name])
    assert server.ask("a", 60, []) == greedy(prompts["a"])
    # Full; b is the one that was not asked for longest.
    assert server.ask("d", 0, prompts["d"]) == greedy(prompts["d"])
    assert server.ask("b", 60, []) is None
    assert server.ask("a", 60, []) == greedy(prompts["a"])
    assert server.ask("c", 60, []) == greedy(prompts["c"])
    server.blocks.check()


def test_sequences_asked_for_together_do_not_push_each_other_out():
    server = Counting(num_blocks=7)
    prompts = {name: random_prompt(ord(name), 60) for name in "abcd"}
    queries = [DraftQuery(name, 0, prompts[name]) for name in "abcd"]
    answers = server.engine.propose(queries, 4)
    assert [answers[name] for name in "abc"] == [greedy(prompts[name]) for name in "abc"]
    assert answers["d"] == []


def test_several_decode_workers_at_once():
    server = Counting(num_blocks=40)
    tokens = {f"{worker}/{i}": random_prompt(10 * worker + i, 20 + 9 * i) for worker in range(3) for i in range(3)}
    agreed = dict.fromkeys(tokens, 0)
    for turn in range(12):
        # Each call brings another worker's sequences; now and then two workers' calls are put together.
        names = [n for n in tokens if int(n[0]) in ({turn % 3}, {turn % 3, (turn + 1) % 3})[turn % 4 == 3]]
        answers = server.engine.propose([DraftQuery(n, agreed[n], tokens[n][agreed[n] :]) for n in names], 3)
        for index, name in enumerate(names):
            assert answers[name] == greedy(tokens[name], 3)
            stood = (turn + index) % 4
            tokens[name] = tokens[name] + answers[name][:stood]
            agreed[name] = len(tokens[name])
            tokens[name].append((turn * 7 + index) % 32)
    server.blocks.check()


def test_near_the_end_of_the_context_there_is_no_draft():
    server = Counting(max_model_len=50)
    prompt = random_prompt(0, 45)
    assert server.ask("x", 0, prompt) == greedy(prompt)
    assert server.ask("x", 45, [1]) == []
    assert server.ask("x", 46, [2], count=2) == greedy([*prompt, 1, 2], 2)


def test_a_sequence_larger_than_the_cache_gets_no_draft():
    server = Counting(num_blocks=3)
    assert server.ask("long", 0, random_prompt(0, 90)) == []
    prompt = random_prompt(1, 20)
    assert server.ask("short", 0, prompt) == greedy(prompt)
    server.blocks.check()


def test_a_long_prompt_is_caught_up_with_over_several_calls():
    server = Counting(max_batch_tokens=32)
    prompt = random_prompt(0, 80)
    answers = [server.ask("x", 0, prompt), server.ask("x", 80, []), server.ask("x", 80, [])]
    assert answers == [[], [], greedy(prompt)]
    assert max(server.passes) <= 32
