"""Fetches as a gateway predicts them: priors first, then what workers report."""

import pytest

from serve_app.costs.steps import StepSample
from serve_app.costs.transfers import FetchSample
from serve_app.routing.costs import CostModel


def test_a_fetch_pays_only_while_it_is_faster_than_computing() -> None:
    costs = CostModel()
    assert costs.fetch_pays("node", 4096)
    assert not costs.fetch_pays("node", 8)  # its latency alone costs more
    slow = [FetchSample("node", 1000, 1.0)] * 200
    costs.take([], slow, "w")
    assert costs.fetch_seconds("node", 1000) == pytest.approx(1.0, rel=0.1)
    assert not costs.fetch_pays("node", 4096)


def test_of_many_workers_a_part_of_each_ones_steps_is_taken_in() -> None:
    costs, steps = CostModel(), [StepSample(0, 0, 20, 40_000, 0.01)] * 16
    for worker in range(160):
        costs.take(steps, [], f"w{worker}")
    before = costs.samples
    for worker in range(160):
        costs.take(steps, [], f"w{worker}")
    assert costs.samples - before == pytest.approx(256, abs=2)
