"""The benchmark of limits, with right answers and with leases that let too much in."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.gateway import limits
from serve_app.state.spending.leases import Leases, Reservation


def run(monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["limits", "--requests", "300", "--minutes", "1", "--json"])
    return limits.main()


def test_figures_come_from_right_answers_only(monkeypatch, capsys):
    assert run(monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["request_us"]["median"] <= found["request_us"]["p99"]
    assert found["overshoot_percent"] == 0 and found["least"] > limits.LIMIT * 0.9
    monkeypatch.setattr(Leases, "take", lambda *_: Reservation())
    with pytest.raises(SystemExit, match="480 were let in"):
        run(monkeypatch)
    assert not capsys.readouterr().out
