"""Decayed means of what moving K/V takes."""

from __future__ import annotations

import pytest

from serve_app.costs.transfers import Rate, Transfer


def test_rates_forget_and_weigh_by_time():
    rate = Rate(100.0)
    rate.add(1, 0.001)
    assert rate.value == pytest.approx(100, rel=0.1)
    for _ in range(100):
        rate.add(1000, 1.0)
    assert rate.value == pytest.approx(1000, rel=0.01)
    assert Rate().value is None


def test_large_amounts_tell_of_the_rate_and_small_ones_of_the_latency() -> None:
    transfer = Transfer(0.01, 1000.0, large=64)
    assert transfer.seconds(500) == pytest.approx(0.51)
    for _ in range(200):
        transfer.add(500, 0.06)
    assert transfer.per_s == pytest.approx(10_000, rel=0.03) and transfer.latency_s == 0.01
    for _ in range(100):
        transfer.add(8, 0.02)
    assert transfer.seconds(0) == pytest.approx(0.02, rel=0.01)
    assert transfer.per_s == pytest.approx(10_000, rel=0.03)
