"""The benchmark of what the ledger adds: right sums, a target that is missed, an entry that is lost."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.gateway import entries
from serve_app.gateway.booking import Booking


def run(monkeypatch, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["entries", "--requests", "40", "--rounds", "1", "--json", *more])
    return entries.main()


@pytest.mark.parametrize("more", [(), ("--fsync",)])
def test_figures_come_from_right_sums_only(monkeypatch, capsys, more):
    monkeypatch.setattr(entries, "ALONE", 10)
    monkeypatch.setattr(entries, "TARGET_MS", float("inf"))
    monkeypatch.setattr(entries, "TARGET_PERCENT", float("inf"))
    assert run(monkeypatch, *more) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["end_ms"] <= found["end_p99_ms"] and found["fsync"] == bool(more)
    monkeypatch.setattr(entries, "TARGET_MS", 0.0)
    assert run(monkeypatch) == 1
    # One of all these goes unwritten.
    entered = Booking.__call__

    def forgetful(self, settled):
        return None if settled.request_id.endswith("-7") else entered(self, settled)

    monkeypatch.setattr(Booking, "__call__", forgetful)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="no figures"):
        run(monkeypatch)
    assert not capsys.readouterr().out
