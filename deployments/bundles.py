"""What of nodes the ranks of a worker get: the bundles of its replica's placement group.

A bundle lies on one node. Ranks that divide a layer speak twice in each of them, too often for a network between
machines, so those of a stage share a bundle. Stages speak once a step, and each has a bundle of its own::

    rank      0 1 2 3 4 5 6 7      tensor 4, pipeline 2
    bundle    0 0 0 0 1 1 1 1
"""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_app.catalog.ranks import lies_apart
from serve_app.catalog.records import Stage
from serve_app.parallel.place import Place


def bundles(stage: Stage, gpus: float, largest: float) -> tuple[list[dict[str, float]], str]:
    """The bundles of a worker's ranks, each of which has so many ``gpus``, and Ray's strategy for them. ``largest``:
    GPUs of the node that has most; 0 where that is not known.
    """
    each, count = stage.tensor_parallel, stage.pipeline_parallel
    if lies_apart(stage, largest):
        each, count = 1, stage.ranks
    found = [{"GPU": gpus * each} for _ in range(count)]
    # The replica is in the first one, beside rank 0.
    found[0] = {"CPU": stage.num_cpus, **found[0]}
    return found, "PACK" if count > 1 else "STRICT_PACK"


def bundle_of(place: Place, count: int) -> int:
    """The bundle of a rank, of ``count`` that its worker has."""
    return place.stage if count == place.pipeline else place.rank


def in_group(group: PlacementGroup, place: Place) -> dict[str, Any]:
    """Actor options of a rank in its worker's placement group."""
    at = bundle_of(place, len(group.bundle_specs))
    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=at, placement_group_capture_child_tasks=True
        )
    }


def beside_replica() -> dict[str, Any]:
    """Actor options of rank 0, or of a worker's only process: in any other bundle it would take another rank's GPU, and
    be on another node than its replica. Nothing where no placement group is around the caller.
    """
    group = get_current_placement_group()
    return {} if group is None else in_group(group, Place())
