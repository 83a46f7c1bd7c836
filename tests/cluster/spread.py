"""Ranks with GPUs on two nodes of one machine, whose GPUs are numbers that Ray is told: which nodes placement groups
put them on, asked for as deployments ask. Run by ``test_spread.py``.

A process of its own: ``ray.cluster_utils.Cluster`` is another Ray than the one of the test session.
"""

from __future__ import annotations

import json
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.blueprint import _largest_node
from deployments.bundles import bundles
from deployments.rank_worker import placed
from deployments.supervisor import beside
from serve_app.catalog.records import Stage
from serve_app.worker.spec import WorkerSpec
from tests.cluster.nodes import MB

GPUS_OF_A_NODE = 3
# Ranks that divide layers, stages, and ranks with whole experts.
SHAPES = {"one": (1, 1, 1), "layers": (3, 1, 1), "stages": (2, 2, 1), "thin": (1, 4, 1), "experts": (4, 1, 4)}


@ray.remote(num_cpus=0)
class Rank:
    def where(self) -> tuple[str, tuple[str, ...]]:
        found = ray.get_runtime_context()
        return found.get_node_id(), tuple(found.get_accelerator_ids()["GPU"])

    def others(self, spec: WorkerSpec, ranks: int) -> list[Any]:
        """As rank 0 starts them."""
        self.started = [Rank.options(**placed(spec, rank)).remote() for rank in range(1, ranks)]  # type: ignore[attr-defined]
        return ray.get([each.where.remote() for each in self.started])


@ray.remote(num_cpus=1)
class Replica:
    def start(self, spec: WorkerSpec, ranks: int) -> list[Any]:
        """Its own node, then node and GPU of each rank."""
        self.first = Rank.options(**beside(1)).remote()  # type: ignore[attr-defined]
        own = (ray.get_runtime_context().get_node_id(), ())
        return [own, ray.get(self.first.where.remote()), *ray.get(self.first.others.remote(spec, ranks))]


def shape(tensor: int, pipeline: int, experts: int) -> dict[str, Any]:
    ranks = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "expert_parallel": experts}
    stage = Stage.model_validate({"num_cpus": 1, "num_gpus": 1, "kv_cache_bytes": "1GiB", **ranks})
    wanted, strategy = bundles(stage, 1, _largest_node())
    group = placement_group(wanted, strategy=strategy)
    ray.get(group.ready(), timeout=60)
    spec = WorkerSpec(model="m", stage="decode", weights={}, source="", home="", device="cuda", **ranks)
    # As Serve places a replica.
    inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    replica = Replica.options(scheduling_strategy=inside).remote()  # type: ignore[attr-defined]
    (own, _), *ranks_at = ray.get(replica.start.remote(spec, stage.ranks), timeout=120)
    remove_placement_group(group)
    nodes = [node for node, _ in ranks_at]
    stages = [nodes[tensor * index :][:tensor] for index in range(pipeline)]
    return {
        "beside its replica": nodes[0] == own,
        "gpus": len({(node, gpu) for node, gpus in ranks_at for gpu in gpus}),
        "nodes": len(set(nodes)),
        "nodes of stages": [len(set(each)) for each in stages],
    }


def main() -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * MB})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, num_gpus=GPUS_OF_A_NODE, object_store_memory=80 * MB)
        ray.init(address=cluster.address, namespace="serve_app", log_to_driver=False)
        return {name: shape(*each) for name, each in SHAPES.items()}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main()))
