"""Look-up finds what stood after the same tokens, in the request itself and in the same tenant's answers only."""

from __future__ import annotations

import random

import pytest

from serve_app.engine.speculation import ngram
from serve_app.engine.speculation.ngram import NgramProposer, SuffixIndex, continuation
from serve_app.engine.speculation.recent import RecentProposer
from tests.engine.fake import random_prompt, request


def latest(tokens: list[int]) -> tuple[int, int]:
    """The slow truth: position behind the latest earlier run, and the grade of the longest size that has one."""
    for grade, size in ((2, 8), (1, 4), (0, 2)):
        for position in range(len(tokens) - 1, size - 1, -1):
            if tokens[position - size : position] == tokens[-size:]:
                long = grade == 2 and position >= 20 and tokens[position - 20 : position] == tokens[-20:]
                return position, 3 if long else grade
    return 0, 0


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_the_index_finds_what_a_search_finds(vocab):
    rng = random.Random(vocab)
    for _ in range(15):
        tokens = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
        index = SuffixIndex()
        for _ in range(40):
            if rng.random() < 0.2 and len(tokens) > 12:  # a passage again
                begin = rng.randrange(len(tokens) - 10)
                tokens += tokens[begin : begin + rng.randrange(30)]
            tokens += [rng.randrange(vocab) for _ in range(rng.randrange(4))]
            index.update(tokens)
            assert index.find(tokens) == latest(tokens)


def test_a_long_prompt_is_taken_in_over_several_steps(monkeypatch):
    monkeypatch.setattr(ngram, "CHUNK", 10)
    tokens, index = random_prompt(0, 60, vocab=9), SuffixIndex()
    for calls in range(1, 7):
        index.update(tokens)
        assert index.indexed == min(59, 10 * calls)
    assert index.find(tokens) == latest(tokens)


def test_what_is_copied_goes_round_again_at_the_end():
    assert continuation([1, 2, 3, 4, 5], 3, 7) == [4, 5, 4, 5, 4, 5, 4]
    assert continuation([1, 2, 3, 4, 5], 1, 2) == [2, 3]


def test_proposals_follow_the_text_and_the_draft_before_them():
    proposer = NgramProposer()
    text = list(range(100, 140))
    one = request("x", [*text, 7, *text[:10]], max_tokens=99)
    draft = proposer.propose([one], 5)["x"]
    assert (draft.tokens, draft.grade) == (text[10:15], 2)
    one.draft = text[10:12]
    assert proposer.propose([one], 3)["x"].tokens == text[12:15]
    assert proposer.propose([request("new", [1, 2, 3], max_tokens=9)], 5) == {}
    proposer.forget("x")
    proposer.forget("never seen")


def test_after_misses_look_ups_rest_and_come_back():
    proposer, looked = NgramProposer(), []
    one = request("x", [1, 2, 1, 2], max_tokens=999)
    for step in range(60):
        looked.append(bool(proposer.propose([one], 4)))
        # Always the same pair behind which something else comes each time.
        one.tokens += [1000 + step, 1, 2]
    assert all(looked[:4]) and 8 < sum(looked) < 25
    tail = [50, 51, 52, 53, 54, 55, 56, 57, 58]
    one.tokens += tail * 2
    hits = 0
    for step in range(40):
        drafts = proposer.propose([one], 1)
        hits += drafts != {} and drafts["x"].tokens == [tail[step % 9]]
        one.tokens.append(tail[step % 9])
    # One more miss, one more rest, then every one.
    assert hits >= 40 - 2 * NgramProposer.REST


def ended(proposer: RecentProposer, name: str, root: bytes, prompt: list[int], answer: list[int]) -> None:
    one = request(name, prompt, root=root, max_tokens=99)
    proposer.propose([one], 4)
    one.tokens += answer
    proposer.forget(name)


def test_an_earlier_answer_is_found_by_the_same_tenant_only():
    proposer = RecentProposer()
    answer = list(range(200, 230))
    ended(proposer, "a", b"mine", [1, 2, 3], answer)
    mine = request("b", [9, 9, *answer[:6]], root=b"mine", max_tokens=99)
    other = request("c", [9, 9, *answer[:6]], root=b"other", max_tokens=99)
    drafts = proposer.propose([mine, other], 4)
    assert set(drafts) == {"b"} and drafts["b"].tokens == answer[6:10]
    begin = request("d", [5, 1, 2, 3, 200], root=b"mine", max_tokens=99)
    assert proposer.propose([begin], 2)["d"].tokens == [201, 202]


def test_old_answers_and_tenants_go():
    proposer = RecentProposer(limit_tokens=100, tenants=3)
    for turn in range(20):
        ended(proposer, str(turn), b"mine", [1], [1000 * turn + i for i in range(40)])
    found = [
        bool(proposer.propose([request(f"q{t}", [1000 * t + i for i in range(9)], root=b"mine", max_tokens=9)], 2))
        for t in range(20)
    ]
    assert not any(found[:14]) and all(found[17:])
    for tenant in range(5):
        ended(proposer, f"t{tenant}", bytes([tenant]), [1], [1, 2, 3, 4, 5, 6])
    assert proposer.propose([request("q", [19000 + i for i in range(9)], root=b"mine", max_tokens=9)], 2) == {}


def test_a_request_that_never_began_leaves_nothing():
    proposer = RecentProposer()
    ended(proposer, "a", b"mine", [1, 2, 3], [])
    assert proposer.propose([request("b", [1, 2, 3], root=b"mine", max_tokens=9)], 4) == {}
