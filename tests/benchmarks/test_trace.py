"""Trace replay and routing in a second each, and with a cluster that loses requests."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import trace
from benchmarks.trace import command, live, routing
from benchmarks.trace.measure import Result
from benchmarks.trace.requests import (
    beside_each_other,
    read_trace,
    synthetic_rows,
    unlimited_hit_ratio,
    write_trace,
)
from serve_app.routing.admission import Admission
from serve_app.routing.planner import Planner


@pytest.fixture
def path(tmp_path):
    write_trace(tmp_path / "trace.jsonl", synthetic_rows(40))
    return tmp_path / "trace.jsonl"


def test_trace(path, capsys):
    few = ["--rates", "4", "--policies", "product,kv:4", "--workers", "4", "--jobs", "1", "--json"]
    assert trace.main([str(path), *few]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["compared"]["x4"]["ttft_p90_over_kv_router"] > 0
    assert [row["requests"] for row in found["rows"]] == [40, 40]


def test_traces_beside_each_other_share_nothing(path):
    one = read_trace(path)
    three = beside_each_other(one, 3)
    assert len({request.id for request in three}) == 120 and sorted(r.at for r in three) == [r.at for r in three]
    assert unlimited_hit_ratio(three) == pytest.approx(unlimited_hit_ratio(one))
    assert len({key for r in three for key in r.blocks}) == 3 * len({key for r in one for key in r.blocks})


def test_adapters(path, capsys):
    """The router sends requests where their adapter is: fewer are loaded, and first tokens come earlier."""
    write_trace(path, synthetic_rows(300, rate=6.0))
    few = [
        "--rates",
        "4",
        "--policies",
        "product,blind",
        "--workers",
        "4",
        "--jobs",
        "1",
        "--adapters",
        "100",
        "--json",
    ]
    assert trace.main([str(path), *few]) == 0
    ours, blind = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert 100 <= ours["adapter_loads"] < 0.7 * blind["adapter_loads"]
    assert ours["ttft_p50_ms"] < blind["ttft_p50_ms"]


def test_a_cluster_that_loses_requests(path, capsys, monkeypatch):
    row = {"variant": "product", "policy": "product", "rate": 4.0, "problem": "39 requests ended and 0 were refused"}
    monkeypatch.setattr(command, "simulate", lambda job: dict(row))
    monkeypatch.setattr(command, "ProcessPoolExecutor", ThreadPoolExecutor)
    with pytest.raises(SystemExit, match="no figures(?s:.)*product at 4x: 39 requests ended"):
        trace.main([str(path), "--rates", "4", "--policies", "product"])
    assert capsys.readouterr().out == ""


def test_what_counts_as_lost(path):
    requests = read_trace(path)
    ids = [r.id for r in requests]
    whole = Result("p", 1.0, requests=40, output_tokens=sum(r.output for r in requests), done=ids, ttft=[1.0] * 40)
    assert command.problem(whole, requests) is None
    whole.output_tokens -= 1
    assert "tokens instead of" in str(command.problem(whole, requests))
    whole.done = ids[1:]
    assert "39 requests ended" in str(command.problem(whole, requests))
    whole.done = [*ids[1:], ids[1]]
    assert "ended twice" in str(command.problem(whole, requests))


def test_a_live_replay_counts_errors_as_errors():
    assert live.problem(live.Outcome(200, ended=True, output=3)) is None
    assert live.problem(live.Outcome(429)) is None
    assert live.problem(live.Outcome(200, output=3)) == "its stream ended before its answer"
    assert live.problem(live.Outcome(503)) == "status 503"


def test_routing(capsys, monkeypatch):
    few = ["--decisions", "200", "--keys", "20000", "--full", "2000", "--plans", "3"]
    assert routing.main([*few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows"][0]["decisions"] == 200 and found["plans"][2]["ms_per_plan"] > 0
    assert found["memory"]["ms_to_forget_a_worker"] < 50
    monkeypatch.setattr(Admission, "place", lambda *_: None)
    with pytest.raises(SystemExit, match="no figures(?s:.)*a decision among 8 workers: None"):
        routing.main(few)
    assert capsys.readouterr().out == ""


def test_a_planner_that_forgets_a_worker(monkeypatch):
    planned = Planner.plan

    def forgetful(self, loads, *more, **named):
        found = planned(self, loads, *more, **named)
        found.roles.pop("w5")
        return found

    monkeypatch.setattr(Planner, "plan", forgetful)
    with pytest.raises(SystemExit, match="no figures(?s:.)*roles of 8 workers"):
        routing.plans(8, 3, 0)
