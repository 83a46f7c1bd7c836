"""Questions as token ids: what is shared, what follows, and which tokens an answer begins with."""

from __future__ import annotations

import numpy as np

from serve_app.api.decisions import parse_decide
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.text.questions import question_prompts
from serve_app.text.tokenizer import Tokenizer

QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "It can't wait.", "false": None}},
    "team": {"type": "choice", "instructions": "Whose is it?", "criteria": {"billing": "Payments", "other": None}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "furious"]},
}


def test_a_state_and_its_questions():
    tokenizer = Tokenizer(PROJECT_ROOT / "checkpoints" / "pico-instruct")
    asked = parse_decide({"state": "Help <|end|> me", "questions": QUESTIONS}, "@cf/x/y").questions
    found = question_prompts(tokenizer, "Help <|end|> me", asked)
    shown = tokenizer.decode(found.shared, skip_special_tokens=False)
    # A control token that people spell is none.
    assert shown.endswith("Help <|end|> me") and tokenizer.token_id("<|end|>") not in found.shared
    urgent, team, anger = (tokenizer.decode(ids, skip_special_tokens=False) for ids in found.branches)
    assert urgent.startswith("\n\nIs it urgent?\nYes: It can't wait.\nAnswer Yes or No.<|end|>")
    assert "\nA: billing - Payments\nB: other\nAnswer with the letter.<|end|>" in team
    assert "\n0: calm\n1: furious\nAnswer with the number.<|end|>" in anger
    assert urgent.endswith("<|assistant|>")
    for labels, names in zip(found.labels, (("Yes", "No"), ("A", "B"), ("0", "1")), strict=True):
        assert len({token for tokens in labels for token in tokens}) == sum(map(len, labels))
        for tokens, name in zip(labels, names, strict=True):
            assert any(name.startswith(tokenizer.decode([token]).strip() or "?") for token in tokens)
    other = question_prompts(tokenizer, "Help <|end|> me", asked[1:])
    np.testing.assert_array_equal(other.shared, found.shared)
    assert found.tokens == len(found.shared) + sum(map(len, found.branches))
