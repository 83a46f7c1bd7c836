"""RankWorker: the Ray actor around a rank beside rank 0, which is an EngineWorker and starts it."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.bundles import in_group
from serve_app.parallel.link import LinkAddress
from serve_app.parallel.place import Place
from serve_app.parallel.shelf import Shelf
from serve_app.ray_private.fork_server import forked
from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec


@ray.remote(num_cpus=0)
class RankWorker:
    """Computes its part of each step of rank 0, whose process it ends with."""

    def __init__(self, spec: WorkerSpec, rank: int, address: LinkAddress) -> None:
        progress = begin(spec, rank)
        node = ray.get_runtime_context().get_node_id()
        self._shelf = shelf = Shelf(spec.export_bytes)

        def run() -> None:
            from serve_app.worker.follower import run_rank

            try:
                run_rank(spec, rank, address, progress, shelf, node)
            finally:
                os._exit(0)

        # A thread: the actor is there at once, and Ray hears from it.
        threading.Thread(target=run, name=f"rank-{rank}").start()

    async def export_chunk(self, chunk_id: str) -> Any:
        """This rank's part of a chunk, for the pool, which then owns the object."""
        return await asyncio.to_thread(self._shelf.take, chunk_id)

    async def forget(self, chunk_ids: list[str]) -> None:
        """The pool will not come for these."""
        self._shelf.forget(chunk_ids)

    async def hold(self, tickets: list[int], values: list[Any], timeout_s: float) -> list[str]:
        """See :func:`serve_app.worker.rank_store.hold`."""
        from serve_app.worker.rank_store import hold

        return await hold(self._shelf, tickets, values, timeout_s)


def start_rank(spec: WorkerSpec, rank: int, address: LinkAddress) -> Any:
    """Called in rank 0's process; its handle keeps the actor alive."""
    options = RankWorker.options(**placed(spec, rank))  # type: ignore[attr-defined]
    return options.remote(spec, rank, address)


def placed(spec: WorkerSpec, rank: int) -> dict[str, Any]:
    """Actor options of a rank: with a GPU in its stage's bundle of the replica's placement group, else on rank 0's
    node.
    """
    if spec.device == "cpu":
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"num_gpus": 0, "scheduling_strategy": here, **forked(with_torch=True)}
    group = get_current_placement_group()
    if group is None:
        raise RuntimeError("ranks with GPUs are started within their replica's placement group")
    return {"num_gpus": 1, **in_group(group, Place(spec.tensor_parallel, spec.pipeline_parallel, rank))}


def host_for_ranks(spec: WorkerSpec) -> str:
    """Where rank 0 listens for the others; on one node nobody else's business."""
    return get_node_ip_address() if spec.several_nodes and spec.device != "cpu" else "127.0.0.1"
