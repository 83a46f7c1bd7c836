"""Decisions over HTTP: the probabilities of transformers' logits for the same tokens."""

from __future__ import annotations

import pytest
import torch

from serve_app.api.decisions import parse_decide
from serve_app.catalog.load import PROJECT_ROOT
from serve_app.text.questions import question_prompts
from serve_app.text.tokenizer import Tokenizer
from tests import tiny
from tests.e2e.conftest import CHAT

FOLDER = PROJECT_ROOT / "checkpoints" / "pico-instruct"
STATE = "The function itertools.chain joins iterables one after the other. " * 6
QUESTIONS = {
    "joins": {"type": "noul", "instructions": "Does it join iterables?"},
    "module": {"type": "choice", "instructions": "Which module is it in?", "criteria": ["itertools", "json", "os"]},
    "use": {"type": "score", "instructions": "How useful is it?", "criteria": ["useless", "useful", "vital"]},
}


def test_they_are_transformers_probabilities(run, http):
    told = run(CHAT, {"state": STATE, "questions": QUESTIONS})
    asked = parse_decide({"state": STATE, "questions": QUESTIONS}, CHAT).questions
    prompts = question_prompts(Tokenizer(FOLDER), STATE, asked)
    model = tiny.load_reference(FOLDER)
    for question, ids, labels in zip(asked, prompts.branches, prompts.labels, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompts.shared.tolist(), *ids.tolist()]])).logits[0, -1]
        mass = torch.tensor([float(logits.softmax(-1)[list(tokens)].sum()) for tokens in labels])
        shares = (mass / mass.sum()).tolist()
        answer = told["answers"][question.name]
        found = (
            [answer["noul"], 1 - answer["noul"]] if question.kind == "noul" else list(answer["probabilities"].values())
        )
        assert found == pytest.approx(shares, abs=0.01)
        assert answer["mass"] == pytest.approx(float(mass.sum()), rel=0.05)
    assert told["usage"]["input_tokens"] == prompts.tokens and told["usage"]["output_tokens"] == 0
    again = run(CHAT, {"state": STATE, "questions": QUESTIONS, "calibrate": True})
    assert again["usage"]["cached_tokens"] >= len(prompts.shared) // 32 * 32
    assert again["answers"]["joins"]["noul"] != told["answers"]["joins"]["noul"]
    long = http.post(f"/run/{CHAT}", json={"state": "word " * 9000, "questions": QUESTIONS})
    assert long.status_code == 413
