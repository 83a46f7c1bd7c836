"""Texts in parts: nothing is lost, nothing is too long, and nothing is silent."""

from __future__ import annotations

from random import Random

from serve_app.text.sentences import LONGEST, sentences


def test_sentences():
    text = 'He said: "Stop!" Then he left... Why? Nobody knows.\nNew line\n\n***\n你好。再见。'
    assert sentences(text) == [
        'He said: "Stop!"', "Then he left...", "Why? Nobody knows.", "New line ***", "你好。 再见。",
    ]  # fmt: skip
    assert sentences("Hi.") == ["Hi."] and sentences(" \n ") == [] and sentences("!?") == []


def test_every_character_that_counts_stays():
    rng = Random(1)
    for _ in range(200):
        text = "".join(rng.choice("abc  ,.;!?\n-—。") for _ in range(rng.randint(1, 900)))
        found = sentences(text)
        assert [c for part in found for c in part if c.isalnum()] == [c for c in text if c.isalnum()]
        assert all(len(part) <= LONGEST and any(map(str.isalnum, part)) for part in found)
    assert [len(part) for part in sentences("x" * 1000)] == [300, 300, 300, 100]
