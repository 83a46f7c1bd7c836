"""The zone of the node that a process is on, as whoever started the node has told it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# Set on each node by who runs it; comes before what Ray has found out.
VARIABLE = "SERVE_APP_ZONE"
# Labels of nodes that Ray sets on clouds and Kubernetes, and that `ray start --labels` sets by hand.
ZONE, REGION = "ray.io/availability-zone", "ray.io/availability-region"
MOST = 120


def node_zone() -> str:
    """``region/zone``, ``region/``, ``zone``, or "" where nobody has told. Needs a connected process."""
    import ray

    said = os.environ.get(VARIABLE, "").strip()
    return said[:MOST] if said else zone_of(ray.get_runtime_context().get_node_labels() or {})


def zone_of(labels: Mapping[str, Any]) -> str:
    """What a node's labels say."""
    zone, region = _text(labels.get(ZONE)), _text(labels.get(REGION))
    # A region alone keeps its slash: it is near its own zones, and no zone beside those without a region.
    return f"{region}/{zone}"[:MOST] if region else zone[:MOST]


def _text(value: Any) -> str:
    """Ray gives labels as text, or as lists of one."""
    found = value[0] if isinstance(value, (list, tuple)) and value else value
    return found.strip() if isinstance(found, str) else ""
