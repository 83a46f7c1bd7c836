"""How many replicas a stage of a text model should have: as many as the gateways' planners say that it needs.

Requests wait in gateways, so Serve's own count of ongoing requests sees a part of the demand. Each gateway sends the
work it measures along with its subscriptions (:mod:`serve_app.gateway.dispatch.subscriptions`), replicas report the
sum, and this policy turns it into replicas; bounds and delays are Serve's, from the catalogue.

Serve pickles this module by value and runs it in its controller: it imports nothing of ours.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

# What replicas report, in replicas; see `EngineStage.record_autoscaling_stats`.
NEEDED = "needed_replicas"
# Half a percent of a replica's time is no reason to start another.
SLACK = 0.05


def follow_plan(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas wanted, and no state. Without a fresh plan, by requests, as Serve does by itself."""
    told = (context.aggregated_metrics or {}).get(NEEDED)
    requests = context.total_num_requests
    # A negative number says that no gateway has a plan.
    needed = max(told.values(), default=-1.0) if told else -1.0
    if needed < 0:
        return math.ceil(requests / context.config.target_ongoing_requests), {}
    return max(math.ceil(needed - SLACK), 1 if requests > 0 else 0), {}
