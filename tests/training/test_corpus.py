"""The corpus: built the same way twice, no empty or mangled answers, batches that depend on seed and step
alone.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training import code_text, tokenizer, toolcalls
from training.data import FACT_TURNS, Batches
from training.dialogue import Sampler
from training.facts import build_facts, sentences, third_person
from training.passages import Examples, build_passages
from training.phrases import ASK, HELD_OUT

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "pico-instruct"


@pytest.fixture(scope="module")
def facts():
    return build_facts()


@pytest.mark.slow
def test_facts_are_deterministic_and_cover_the_well_known_names(facts):
    assert facts == build_facts()
    names = {f.name for f in facts}
    assert len(names) == len(facts) > 1500
    for wanted in (
        "itertools.chain",
        "collections.deque",
        "os.path.join",
        "str.split",
        "json",
        "asyncio.gather",
    ):
        assert wanted in names


@pytest.mark.slow
def test_facts_do_not_depend_on_what_else_is_imported():
    """In interpreters of their own: libraries patch the standard library; transformers adds to logging.Logger."""
    code = "from training.facts import build_facts; print('\\n'.join(f.answer for f in build_facts()))"

    def answers(before: str) -> list[str]:
        command = [sys.executable, "-c", before + code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKPOINT.parents[1])
        return done.stdout.splitlines()

    assert answers("") == answers("import transformers.utils.logging; ")


def test_no_answer_is_empty_or_carries_docstring_debris(facts):
    for f in facts:
        assert len(f.tail.strip(": ")) >= 10, f
        assert len(f.answer) <= 340, f
        assert f.answer.startswith(f"`{f.name}`")
        assert f.answer.rstrip()[-1] in ".!?", f
        assert "\n" not in f.answer and ">>>" not in f.answer and "<|" not in f.answer, f


def test_answers_read_as_sentences(facts):
    answers = {f.name: f.answer for f in facts}
    assert answers["math.sqrt"] == "`math.sqrt` returns the square root of x."
    assert third_person("Copy") == "copies" and third_person("push") == "pushes" and third_person("Return") == "returns"
    assert sentences("Do this, e.g. That. Then stop: ") == "Do this, e.g. That. Then stop."


def test_held_out_phrasings_do_not_occur_in_training():
    assert not set(HELD_OUT) & set(ASK)


def test_tool_conversations_call_a_listed_tool_with_values_from_the_question():
    rng = random.Random(5)
    calls = 0
    for _ in range(300):
        messages, tools = toolcalls.sample(rng, ("Hello", "Hello!"))
        listed = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in tools}
        asked = next(m["content"] for m in messages if m["role"] == "user")
        for call in (c["function"] for m in messages for c in m.get("tool_calls", ())):
            calls += 1
            assert set(call["arguments"]) == set(listed[call["name"]])
            for v in call["arguments"].values():
                assert str(v) in asked
    assert calls > 150


def test_side_turns_have_answers(facts):
    sampler, rng = Sampler(facts), random.Random(1)
    for _ in range(500):
        question, answer = sampler.side_turn(rng)
        assert question.strip() and answer.strip()


@pytest.mark.slow
def test_code_pieces_compile(facts):
    pieces = code_text.functions()
    assert len(pieces) > 1000
    assert pieces == code_text.functions()
    for piece in pieces[::50]:
        compile(piece, "piece", "exec")
    stubs = [s for s in map(code_text.stub, facts) if s]
    assert len(stubs) > 500
    assert all(" at 0x" not in s for s in stubs)


@pytest.mark.slow
def test_batches_depend_on_seed_and_step_alone():
    tok = tokenizer.load(CHECKPOINT)
    a, b = Batches(tok, 3), Batches(tok, 3)
    b.step(11)  # a different history
    for x, y in zip(a.step(4), b.step(4), strict=True):
        assert torch.equal(x.ids, y.ids) and torch.equal(x.loss, y.loss)
    other = Batches(tok, 4).step(4)
    assert any(
        x.ids.shape != y.ids.shape or not torch.equal(x.ids, y.ids) for x, y in zip(a.step(4), other, strict=False)
    )


@pytest.mark.slow
def test_loss_covers_the_assistants_tokens_and_nothing_else():
    batches = Batches(tokenizer.load(CHECKPOINT), 0)
    text = "<|begin|><|user|>Hi there<|end|><|assistant|>Hello!<|end|>"
    text += "<|user|>Bye<|end|><|assistant|>Goodbye!<|end|>"
    ids = batches.tok.encode(text, add_special_tokens=False).ids
    marked = [i for i, m in zip(ids, batches.mask(ids), strict=True) if m]
    assert batches.tok.decode(marked, skip_special_tokens=False) == "Hello!<|end|>Goodbye!<|end|>"


@pytest.mark.slow
def test_every_fact_is_seen_once_a_pass_over_the_deck():
    batches = Batches(tokenizer.load(CHECKPOINT), 0)
    n = len(batches.deck)
    seen = [i for step in range(n // FACT_TURNS + 1) for i in batches._facts(step)][:n]
    assert sorted(seen) == list(range(n))


def test_distractors_never_equal_the_right_passage():
    passages = build_passages()
    for held_out in (False, True):
        examples, rng = Examples(passages, held_out), random.Random(2)
        for _ in range(100):
            right = rng.choice(examples.pool)
            others = examples.distractors(right, 10, rng)
            assert len(others) == 10 and right.held_out == held_out
            assert all(o.bare != right.bare and o.held_out == held_out for o in others)


def test_question_list_is_large_and_partly_unseen():
    items = json.loads((Path(tokenizer.__file__).with_name("questions.json")).read_text())["questions"]
    assert len(items) >= 60 and sum(i["held_out"] for i in items) >= 20
    assert len({i["question"] for i in items}) == len(items)
    for i in items:
        assert i["expect"] and all(group and all(w == w.lower() and w for w in group) for group in i["expect"])
