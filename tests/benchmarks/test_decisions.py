"""What questions cost: measured on the shipped model, and every answer checked."""

from __future__ import annotations

import json

from benchmarks.__main__ import run
from benchmarks.engine import decisions


def test_questions_are_measured_beside_what_they_must_take(capsys, monkeypatch):
    monkeypatch.setattr(decisions, "LENGTHS", (4,))
    assert run(["decisions", "--questions", "3", "--rounds", "1", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    # The state in one step, and all questions in another.
    assert row["steps"] == 2 and row["tokens"] > 1 and row["question_tokens"] > 3 * 10
