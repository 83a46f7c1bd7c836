"""The speculation benchmark on a few answers, and with drafts that change them."""

from __future__ import annotations

import json

import pytest

from benchmarks.speculation import speculation
from serve_app.engine.step import Step

FEW = ["--batch", "1", "--tokens", "16", "--rounds", "1", "--workloads", "edit", "--sides", "ngram+draft"]


def test_answers_equal_plain_ones(capsys):
    assert speculation.main([*FEW, "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["workloads"]["edit"]["1"]["ngram+draft"]["ratio"] > 0


@pytest.mark.slow
def test_drafts_that_change_the_answer(capsys, monkeypatch):
    run = speculation.GivenRunner.run

    def other(self: speculation.GivenRunner, step: Step) -> list:
        found = run(self, step)
        for item, sampled in zip(step.scheduled, found, strict=True):
            if item.samples > 1:  # a step with drafts
                sampled.token_ids[0] += 1
        return found

    monkeypatch.setattr(speculation.GivenRunner, "run", other)
    with pytest.raises(SystemExit, match="no figures(?s:.)*beside plain"):
        speculation.main([*FEW, "--threads", "1"])
    assert capsys.readouterr().out == ""
