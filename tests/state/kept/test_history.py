"""History by the minute and the hour: what adds up, what is kept, and quantiles of histograms."""

from __future__ import annotations

import random

import pytest

from serve_app.state.kept.history import (
    BORDERS,
    EVERYBODY,
    HOUR_S,
    KEPT_S,
    MINUTE_S,
    SIZE,
    HistoryRow,
    Numbers,
)


def made(requests: int, *ttft: float) -> Numbers:
    numbers = Numbers()
    numbers.bump("requests", requests)
    for seconds in ttft:
        numbers.observe("ttft", seconds)
    return numbers


def test_rows_are_replaced_added_up_and_dropped_in_time(store):
    history = store.history
    rows = [
        HistoryRow(MINUTE_S, 600, gateway, account, "m", made(count))
        for gateway, account, count in (("g1", "a", 1), ("g1", EVERYBODY, 1), ("g2", "a", 2), ("g2", EVERYBODY, 2))
    ]
    history.write(rows)
    history.write(rows)
    found = history.read(MINUTE_S, 0, 1200, "a")
    assert sorted((r.gateway, r.numbers[0]) for r in found) == [("g1", 1), ("g2", 2)]
    history.write([HistoryRow(MINUTE_S, 600, "g1", "a", "m", made(5))])
    assert sum(r.numbers[0] for r in history.read(MINUTE_S, 600, 601, "a")) == 7
    assert {r.account for r in history.read(MINUTE_S, 0, 1200, None)} == {"a"}
    assert history.read(MINUTE_S, 0, 600, "a") == history.read(MINUTE_S, 601, 1200, "a") == []
    assert history.read(MINUTE_S, 0, 1200, "a", "another") == history.read(HOUR_S, 0, 1200, "a") == []
    history.write([HistoryRow(HOUR_S, 0, "g1", "a", "m", made(5))])
    history.trim(600 + KEPT_S[MINUTE_S])
    assert len(history.read(MINUTE_S, 0, 1200, "a")) == 2
    history.trim(660 + KEPT_S[MINUTE_S])
    assert history.read(MINUTE_S, 0, 1200, "a") == [] and len(history.read(HOUR_S, 0, 1200, "a")) == 1
    history.trim(3600 + KEPT_S[HOUR_S])
    assert history.read(HOUR_S, 0, 1200, "a") == []


def test_quantiles_lie_in_the_bucket_of_the_true_one_also_of_sums():
    draw = random.Random(7)
    seconds = [draw.lognormvariate(-2, 1) for _ in range(4000)]
    whole, parts = made(0, *seconds), [made(0, *seconds[i::3]) for i in range(3)]
    added = Numbers()
    for part in parts:
        added.add(part)
    # Of an older program, which had fewer numbers.
    added.add([0] * 5)
    assert added.buckets("ttft") == whole.buckets("ttft") and len(added) == SIZE
    assert added.sum_s("ttft") == pytest.approx(sum(seconds), abs=1e-2)
    borders = (0.0, *BORDERS["ttft"], float("inf"))
    for share in (0.5, 0.9, 0.99):
        true, told = sorted(seconds)[int(share * len(seconds))], whole.quantile("ttft", share)
        assert told is not None
        at = next(i for i, border in enumerate(borders[1:]) if true <= border)
        assert borders[at] <= told <= borders[at + 1]
    assert Numbers().quantile("ttft", 0.5) is None and made(1, 99.0).quantile("ttft", 0.5) == BORDERS["ttft"][-1]
