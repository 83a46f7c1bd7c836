"""`serve-app usage`: a table with bars, CSV and JSON, from the store itself."""

from __future__ import annotations

import csv
import io
import json

import pytest

from serve_app.cli import main
from serve_app.cli.usage import bar, table
from serve_app.state.store.sql import SqlStore
from tests.gateway.usage.conftest import CHAT, EMBED, ENTRIES, START

SINCE = ["--since", str(START)]


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    with SqlStore(tmp_path) as store:
        store.open()
        store.write([entry.row() for entry in ENTRIES])

    def run(*arguments: str) -> str:
        assert main(["usage", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_a_row_a_day_with_bars_and_totals(shell):
    lines = shell(*SINCE).splitlines()
    assert lines[0].split() == ["day", "requests", "input", "cached", "output", "neurons", "cost"]
    first = lines[1].split()
    assert first[1:6] == ["4", "400", "160", "40", "8.00"] and first[-1] == "█" * 24
    assert [line.split()[0] for line in lines[-2:]] == ["total", "total"]
    assert lines[-2].split()[1] == "7" and lines[-2].endswith("USD") and lines[-1].endswith("0.00002 EUR")
    assert max(map(len, lines)) <= 120


def test_by_model_key_and_account(shell):
    lines = shell(*SINCE, "--by", "model", "--account", "local").splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [CHAT, CHAT, EMBED]
    keys = shell(*SINCE, "--by", "key", "--account", "team").splitlines()
    assert keys[1].split()[:2] == ["key3", "2"] and len(keys) == 3
    assert shell(*SINCE, "--account", "nobody") == "Nothing was used in this time.\n"


def test_csv_and_json(shell):
    rows = list(csv.DictReader(io.StringIO(shell(*SINCE, "--by", "account", "--csv"))))
    assert {(row["account"], row["requests"], row["currency"]) for row in rows} == {
        ("local", "5", "USD"), ("local", "1", "EUR"), ("team", "2", "USD")
    }  # fmt: skip
    told = json.loads(shell(*SINCE, "--by", "hour", "--json", "--model", EMBED))
    assert [row["requests"] for row in told["result"]] == [1] and told["result_info"]["interval"] == "hour"


def test_wrong_times_are_told(shell, capsys):
    assert main(["usage", "--since", "soon"]) == 2
    assert "--since: 'soon' is no time" in capsys.readouterr().err
    assert main(["usage", "--since", "2001-01-01", "--by", "hour"]) == 2


def test_what_fits_no_narrow_window_has_no_bars():
    assert bar(1.0, 10, blocks=True) == "█" * 10 and bar(0.0, 10, blocks=True) == ""
    assert bar(0.06, 10, blocks=True) == "▋" and bar(0.001, 10, blocks=True) == "▏"
    assert bar(0.5, 10, blocks=False) == "#####" and bar(0.001, 10, blocks=False) == "#"
    assert table([], "day", 80, blocks=True) == "Nothing was used in this time.\n"
