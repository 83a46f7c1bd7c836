"""The benchmark of usage on two short weeks, and where a sum is wrong."""

from __future__ import annotations

import json
import sys

import pytest
import sqlalchemy as sa

from benchmarks import usage
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger_days


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(usage, "ACCOUNTS", 6)
    monkeypatch.setattr(usage, "_SMALL", "account3")


def test_all_questions_are_answered_rightly(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["usage", "--json", "--weeks", "2", "--requests", "500"])
    assert usage.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert told["database"] == "sqlite" and told["hour_rows"] > told["day_rows"] > 14
    assert len(told["queries"]) == 13 and all(found["rows"] for found in told["queries"].values())


def test_a_wrong_sum_gives_no_figure(tmp_path):
    with SqlStore(tmp_path) as store:
        store.open()
        asked = usage.cases(usage.fill(store, 2, 500), 2)
        usage.measure(store, asked, 1)
        with store.database.writing() as connection:
            connection.execute(sa.update(ledger_days).values(entries=ledger_days.c.entries + 1))
        with pytest.raises(SystemExit, match="no figures"):
            usage.measure(store, asked, 1)
