"""Metrics of the gateway: totals become increments, and what is gone is shown as gone."""

from __future__ import annotations

from typing import Any

import pytest

from deployments import metrics
from deployments.metrics import MAX_ACCOUNTS, GatewayMetrics
from serve_app.api.types import Usage
from serve_app.gateway.tally import Tally
from serve_app.state.callers.accounts import Caller
from serve_app.tasks.work import Settled


class Series:
    """Stands in for Ray's: a metric of the test's own process has no reader."""

    made: dict[str, Series]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.info = {"name": name}
        self.tags = set(tag_keys)
        assert not self.tags & {"deployment", "replica", "application"}, "Serve sets these by itself"
        self.values: dict[tuple, float] = {}
        Series.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self.tags
        self.values[tuple(tags.values())] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self.tags and value > 0
        self.values[tuple(tags.values())] = self.values.get(tuple(tags.values()), 0) + value


@pytest.fixture
def series(monkeypatch):
    Series.made = {}
    monkeypatch.setattr(metrics.metrics, "Counter", Series)
    monkeypatch.setattr(metrics.metrics, "Gauge", Series)
    return Series.made


def stats(**changes: Any) -> dict[str, Any]:
    worker = {"replica": "r1", "stage": "decode", "role": "decode", "queued_tokens": 7, "running": 2, "kv_use": 0.5}
    return {
        "why": {"session": 3}, "refused": {"busy": 1}, "prompt_tokens_by_source": {"pool": 10, "computed": 5},
        "cached_tokens": {"expected": 9, "missing": 2, "unexpected": 0},
        "output_tokens": 8, "waiting": {"a": 2}, "prefill_tokens_in_flight": 4, "decode_tokens_in_flight": 6,
        "workers": [worker], **changes,
    }  # fmt: skip


def test_totals_are_counted_once_and_what_is_gone_goes_to_zero(series):
    now = {"m": stats()}
    gateway = GatewayMetrics(lambda: now, Tally())
    gateway.publish()
    gateway.publish()
    assert series["serve_app_requests_placed"].values == {("m", "session"): 3}
    assert series["serve_app_prompt_tokens"].values == {("m", "pool"): 10, ("m", "computed"): 5}
    cached = {("m", "expected"): 9, ("m", "missing"): 2}
    assert series["serve_app_estimated_cached_tokens"].values == cached
    assert series["serve_app_worker_role"].values[("m", "r1", "decode", "decode")] == 1.0
    now["m"] = stats(why={"session": 5}, waiting={"b": 1}, workers=[])
    gateway.publish()
    assert series["serve_app_requests_placed"].values == {("m", "session"): 5}
    assert series["serve_app_requests_waiting"].values == {("m", "a"): 0, ("m", "b"): 1}
    assert series["serve_app_worker_running"].values == {("m", "r1", "decode"): 0}
    assert set(series["serve_app_worker_role"].values.values()) == {0.0}


def test_the_number_of_series_is_bounded(series):
    gateway = GatewayMetrics(
        lambda: {"m": stats(waiting={f"account-{i}": 1 for i in range(3 * MAX_ACCOUNTS)})}, Tally()
    )
    gateway.publish()
    values = series["serve_app_requests_waiting"].values
    assert len(values) == MAX_ACCOUNTS + 1 and values[("m", "(others)")] == 2 * MAX_ACCOUNTS


def test_settled_work_of_every_task_is_counted(series):
    tally = Tally()
    gateway = GatewayMetrics(dict, tally)
    for status, usage in (("done", Usage(10, 5, 4)), ("done", Usage(3)), ("left", Usage(10, 1))):
        tally(Settled(Caller("a"), "m", "a task", usage, status, "", 0.1))
        gateway.publish()
    assert series["serve_app_requests"].values == {("m", "done"): 2, ("m", "left"): 1}
    assert series["serve_app_tokens"].values == {("m", "cached"): 4, ("m", "prompt"): 19, ("m", "completion"): 6}
