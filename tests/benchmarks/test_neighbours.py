"""The benchmark of neighbours: figures from requests that were served once each, and none from others."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.gateway import neighbours


def run(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["neighbours", "--requests", "300", "--rate", "60", "--json"])
    monkeypatch.setattr(neighbours, "LOOKS", 50)
    return neighbours.main()


def test_a_neighbour_takes_what_waits_and_figures_come_from_right_answers_only(monkeypatch, capsys) -> None:
    assert run(monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    alone, helped = found["simulated"]["alone"], found["simulated"]["with_neighbour"]
    assert alone["requests"] == helped["requests"] == 330 and alone["passed"] == 0 < helped["passed"]
    assert helped["ttft_p90_s"] < alone["ttft_p90_s"]
    assert found["look_us"]["idle"] > 0 and found["look_us"]["busy"] > 0

    async def passed(*_: object) -> object:
        return object()

    monkeypatch.setattr("serve_app.gateway.neighbours.passing.Neighbours.passed", passed)
    with pytest.raises(SystemExit, match="no figures: 100 of"):
        run(monkeypatch)
    assert not capsys.readouterr().out
