"""The autoscaling policy by itself, with contexts made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray import cloudpickle

from deployments import autoscale
from deployments.autoscale import NEEDED, follow_plan


def context(requests: float = 0, **needed: float) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics={NEEDED: needed} if needed else {},
        total_num_requests=requests,
        config=SimpleNamespace(target_ongoing_requests=8),
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (context(), 0),
        (context(17), 3),  # nobody has a plan: by requests
        (context(17, a=-1.0, b=-1.0), 3),
        (context(17, a=0.4), 1),  # the plan counts, and not the requests
        (context(0, a=0.0), 0),
        (context(1, a=0.0), 1),  # not away under a request
        (context(0, a=2.04, b=1.9), 2),
        (context(0, a=2.2, b=2.2), 3),  # every replica tells the same sum
        (context(0, a=2.2, b=-1.0), 3),
    ],
)
def test_replicas(given, wanted):
    assert follow_plan(given) == (wanted, {})


def test_the_controller_can_unpickle_it_without_our_code():
    cloudpickle.register_pickle_by_value(autoscale)
    try:
        packed = cloudpickle.dumps(follow_plan)
    finally:
        cloudpickle.unregister_pickle_by_value(autoscale)
    assert b"serve_app" not in packed
    assert cloudpickle.loads(packed)(context(0, a=1.5)) == (2, {})
