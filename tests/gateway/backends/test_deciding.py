"""Decisions from HTTP to the worker's call and back, without a worker: what is asked of it and made of its answer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serve_app.gateway.backends import deciding
from serve_app.tasks.work import WorkerGone
from serve_app.wire.decide import DecideCall, Decided
from serve_app.wire.generate import Failed
from tests.tasks.conftest import ACCOUNT, serve  # noqa: F401

CHAT = "@cf/pico/pico-instruct"
QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "team": {"type": "choice", "instructions": "Whose is it?", "criteria": {"billing": "Payments", "other": None}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "cross", "furious"]},
}


class Worker:
    """Finds each label half as likely as the one before it; is lost at its first call, and refuses adapters' states."""

    def __init__(self) -> None:
        self.asked: list[DecideCall] = []

    async def __call__(self, model, method, call, stage="", replica=""):
        assert method.name == "decide"
        self.asked.append(call)
        if len(self.asked) == 1:
            raise WorkerGone("lost")
        told = []
        for branch in call.branches:
            count = len(np.frombuffer(branch.asked, np.int32))
            told.append(np.array([math.log(0.5 ** (i + 1)) for i in range(count)], np.float32).tobytes())
        if len(self.asked) > 4:
            return Failed("too long", refused=True)
        return Decided(tuple(told), cached=32)


async def test_decisions_over_http(serve):  # noqa: F811
    worker = Worker()
    async with serve(worker, models=(CHAT,)) as found:
        run = f"{ACCOUNT}/run/{CHAT}"
        body = {"state": "My invoice is wrong!", "questions": QUESTIONS}
        answer = await found.http.post(run, json=body)
        assert answer.status_code == 200, answer.text
        result = answer.json()["result"]
        assert result["model"] == CHAT and set(result["answers"]) == set(QUESTIONS)
        lost, call = worker.asked
        assert lost.id != call.id and lost.shared == call.shared and len(call.branches) == 3
        assert 0.5 < result["answers"]["urgent"]["noul"] < 1
        assert result["answers"]["team"]["choice"] == "billing"
        assert sum(result["answers"]["anger"]["probabilities"].values()) == pytest.approx(1)
        tokens = (len(call.shared) + sum(len(branch.ids) for branch in call.branches)) // 4
        usage = result["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["cached_tokens"]) == (tokens, 0, 32)
        # Asked of nothing as well, with the same answers, so that nothing is left of them.
        calibrated = await found.http.post(run, json={**body, "calibrate": True})
        assert calibrated.json()["result"]["answers"]["urgent"]["noul"] == pytest.approx(0.5)
        assert len(worker.asked) == 4 and worker.asked[3].shared != worker.asked[2].shared
        told = await found.http.post(run, json={**body, "options": {"estimate": True}})
        assert told.json()["result"]["units"]["most"]["input_tokens"] == tokens
        refused = await found.http.post(run, json=body)
        assert refused.status_code == 400 and "too long" in refused.text
        assert found.endings == [("text-generation", "done")] * 2 + [("text-generation", "failed")]
        assert found.settled[0].entry.units["input_tokens"] == tokens


async def test_a_huge_question_is_refused_before_it_is_tokenised(serve, monkeypatch):  # noqa: F811
    monkeypatch.setattr(deciding, "question_prompts", None)
    async with serve(models=(CHAT,)) as found:
        about = {f"option {n}": "word " * 3900 for n in range(26)}
        question = {"type": "choice", "instructions": "Which?", "criteria": about}
        body = {"state": "My invoice is wrong!", "questions": {"q": question}}
        refused = await found.http.post(f"{ACCOUNT}/run/{CHAT}", json=body)
        assert refused.status_code == 413 and refused.json()["errors"][0]["code"] == 5021, refused.text
