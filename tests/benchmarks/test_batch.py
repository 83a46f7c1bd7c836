"""The benchmark of batches with few requests, and with an order that loses some."""

from __future__ import annotations

import json

import pytest

from benchmarks.batch import batch, beside, intake, modelled, offline, order, polls
from benchmarks.batch.files import short_requests
from benchmarks.checks import Checks
from benchmarks.engine import checkpoint


def figures(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_order(checkpoint_here, capsys, monkeypatch):
    assert batch.main(["--parts", "order", "--requests", "12", "--json"]) == 0
    found = figures(capsys)
    assert 0 < found["order"]["computed_in_our_order"] <= found["order"]["computed_in_file_order"] and found["answers"]
    # It is small enough for the cache in any order, and says so.
    assert any("order: misses the target" in told for told in found["missed"])
    monkeypatch.setattr(order, "_order", lambda lines: [0, *range(len(lines) - 1)])
    with pytest.raises(SystemExit, match="no figures(?s:.)*in shards, each once"):
        batch.main(["--parts", "order", "--requests", "4"])
    assert capsys.readouterr().out == ""


def test_modelled(capsys, monkeypatch):
    """No clock is read: the figures are the same anywhere, and the target is met anywhere."""
    monkeypatch.setattr(modelled, "SECONDS", 8.0)
    found = []
    for _ in range(2):
        assert batch.main(["--parts", "modelled", "--rounds", "1", "--json"]) == 0
        found.append(figures(capsys)["modelled"])
    assert found[0] == found[1] and found[0]["batch_tokens"] > 100
    assert 0 < found[0]["ttft_p50_growth"] < 1.3 and 0 < found[0]["itl_p99_growth"] < 1.3


@pytest.mark.slow
def test_beside(capsys, monkeypatch):
    monkeypatch.setattr(beside, "UNDER_WAY", 6)
    assert batch.main(["--parts", "beside", "--seconds", "0.4", "--rounds", "1", "--json"]) == 0
    found = figures(capsys)["beside"]
    assert found["streams"] and found["batch_requests"] and found["ttft_p99_growth"] > 0 < found["itl_p99_growth"]


def test_polls(capsys, monkeypatch):
    monkeypatch.setattr(polls, "POLLS", 20)
    assert batch.main(["--parts", "polls", "--batches", "60", "--json"]) == 0
    found = figures(capsys)
    assert found["polls"]["batches"] == 60 and found["polls"]["poll_p99_ms"] > 0 and found["answers"] == 22
    monkeypatch.setattr(polls, "fill", lambda store, count: None)
    with pytest.raises(SystemExit, match="no figures(?s:.)*not the one asked for"):
        polls.polls(1, checks := Checks())
        checks.require()


@pytest.mark.slow
def test_intake(capsys):
    assert batch.main(["--parts", "intake", "--lines", "700", "--json"]) == 0
    found = figures(capsys)["intake"]
    assert found["lines"] == 700 and found["lines_per_s"] > 0 and found["more_mb"] >= 0


def test_inline(capsys):
    assert batch.main(["--parts", "inline", "--bytes", "60000", "--json"]) == 0
    found = figures(capsys)
    assert found["inline"]["native_short"]["requests"] > found["inline"]["native_long"]["requests"] > 0
    assert found["answers"] > 30 and found["inline"]["too_large"]["s"] > 0


def test_what_misses_its_target_says_so():
    assert batch.misses("order", {"gain": 1.6}) == [] and len(batch.misses("order", {"gain": 1.4})) == 1
    assert len(batch.misses("intake", {"more_mb": 200.0, "lines_per_s": 5})) == 2
    assert len(batch.misses("beside", {"ttft_p99_growth": 1.2, "itl_p99_growth": 1.0})) == 1
    assert batch.misses("polls", {"poll_p99_ms": 4.0}) == [] and len(batch.misses("polls", {"poll_p99_ms": 6.0})) == 1
    assert len(batch.misses("inline", {"most_s": 1.2})) == 1
    assert len(batch.misses("offline", {"share": 0.8})) == 1 and intake.LEAST_LINES == 20_000


def test_gaps_are_those_between_tokens():
    stream = beside.Stream(1.0, [1], 3, [(11.5, [7]), (11.7, [8, 9])])
    first, gaps = stream.times(10.0)
    assert first == pytest.approx(0.5) and gaps == pytest.approx([0.1, 0.1]) and stream.answer == [7, 8, 9]
    with pytest.raises(SystemExit, match="no answer came"):
        Checks().require()


def test_offline_alone(tmp_path):
    assert checkpoint.main([str(tmp_path / "tiny"), "tiny"]) == 0
    checks = Checks()
    alone = offline.Alone(tmp_path / "tiny", 1, checks)
    assert alone.run(list(short_requests(offline.MODEL, 3, tokens=offline.TOKENS))) > 0 and checks.require() == 1
    with pytest.raises(SystemExit, match="no figures(?s:.)*tokens of each answer offline"):
        alone.run(list(short_requests(offline.MODEL, 2, tokens=offline.TOKENS + 1)))
        checks.require()


def test_answers_of_a_batch_are_checked():
    lines = list(short_requests(offline.MODEL, 2))

    def row(number: int, tokens: int = offline.TOKENS) -> dict:
        usage = {"completion_tokens": tokens}
        return {"custom_id": f"request-{number}", "response": {"body": {"usage": usage}}}

    for rows, wrong in (([row(0), row(1)], 0), ([row(1), row(0)], 1), ([row(0)], 1), ([row(0), row(1, 3)], 1)):
        checks = Checks()
        offline.check_answers(rows, lines, checks)
        assert checks.wrong.total() == wrong


@pytest.mark.slow
def test_offline_share(capsys):
    assert batch.main(["--parts", "offline", "--requests", "20", "--rounds", "1", "--json"]) == 0
    assert figures(capsys)["offline"]["share"] > 0
