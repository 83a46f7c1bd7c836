"""Fetches as a gateway predicts them: priors first, then what workers report."""

import pytest

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
