"""Decisions on the wire: what is read, what is refused, and how scores become answers."""

from __future__ import annotations

import math

import pytest

from serve_app.api.decisions import Decisions, answers, parse_decide
from serve_app.api.errors import InvalidInput
from serve_app.api.types import Usage

QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "team": {"type": "choice", "instructions": "Whose is it?", "criteria": {"billing": "Payments", "other": None}},
    "anger": {"type": "score", "instructions": {"question": "How angry?"}, "criteria": ["calm", "cross", "furious"]},
}


def test_what_is_read():
    asked = parse_decide({"model": "clef", "state": {"text": "Help!"}, "questions": QUESTIONS}, "@cf/x/y")
    assert asked.state == '{"text": "Help!"}' and not asked.calibrate and asked.model == "@cf/x/y"
    urgent, team, anger = asked.questions
    assert [o.label for o in urgent.options] == ["Yes", "No"]
    assert [(o.key, o.label, o.about) for o in team.options] == [("billing", "A", "Payments"), ("other", "B", "")]
    assert [(o.key, o.about) for o in anger.options] == [("0", "calm"), ("1", "cross"), ("2", "furious")]
    assert anger.instructions == '{"question": "How angry?"}'


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"state": None}, "state"),
        ({"state": ""}, "state"),
        ({"questions": []}, "questions"),
        ({"questions": {}}, "questions"),
        ({"questions": {str(i): QUESTIONS["urgent"] for i in range(65)}}, "questions"),
        ({"questions": {str(i): {"type": "noul", "instructions": "x" * 19_000} for i in range(60)}}, "questions"),
        ({"questions": {"a": {"type": "choice", "instructions": "?", "criteria": ["x" * 10**6, "y"]}}}, "questions"),
        ({"questions": {"a": "why"}}, "questions.a"),
        ({"questions": {"a": {"type": "essay", "instructions": "x"}}}, "questions.a.type"),
        ({"questions": {"a": {"type": "noul"}}}, "questions.a"),
        ({"questions": {"a": {"type": "noul", "instructions": "x", "criteria": {"so": "y"}}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "choice", "instructions": "x"}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "choice", "instructions": "x", "criteria": {"1": ""}}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "choice", "instructions": "x", "criteria": [str(i) for i in range(27)]}}},
         "questions.a.criteria"),
        ({"questions": {"a": {"type": "score", "instructions": "x", "criteria": ["low"]}}}, "questions.a.criteria"),
        ({"questions": {"a": {"type": "noul", "instructions": "x" * 20_001}}}, "questions.a.instructions"),
        ({"images": ["data:image/png;base64,AA=="]}, "images"),
        ({"calibrate": "yes"}, "calibrate"),
    ],
)  # fmt: skip
def test_what_is_refused(change, param):
    with pytest.raises(InvalidInput) as refused:
        parse_decide({"state": "x", "questions": QUESTIONS, **change}, "@cf/x/y")
    assert refused.value.param == param


def test_scores_become_answers():
    asked = parse_decide({"state": "x", "questions": QUESTIONS}, "@cf/x/y")
    logs = tuple(tuple(map(math.log, row)) for row in ((0.3, 0.1), (0.2, 0.2), (0.0625, 0.0625, 0.125)))
    told = answers(asked, Decisions(logs, (), Usage()))
    assert told["urgent"] == pytest.approx({"type": "noul", "noul": 0.75, "mass": 0.4})
    assert told["team"]["probabilities"] == pytest.approx({"billing": 0.5, "other": 0.5})
    assert told["team"]["choice"] == "billing" and told["team"]["confidence"] == pytest.approx(0.0, abs=1e-9)
    assert told["anger"]["score"] == pytest.approx(0.25 + 2 * 0.5)
    assert told["anger"]["legend"] == {"0": "calm", "1": "cross", "2": "furious"}
    assert 0 < told["anger"]["confidence"] < 1


def test_what_is_said_of_nothing_is_taken_out():
    asked = parse_decide({"state": "x", "questions": {"a": QUESTIONS["urgent"]}, "calibrate": True}, "@cf/x/y")
    found = Decisions(((math.log(0.6), math.log(0.2)),), ((math.log(0.3), math.log(0.1)),), Usage())
    assert answers(asked, found)["a"] == pytest.approx({"type": "noul", "noul": 0.5, "mass": 0.8})
