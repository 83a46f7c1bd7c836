"""What the product is compared with: a KV-aware router over per-worker caches, after Dynamo's published cost function.

    cost(worker) = overlap_weight · (prefill blocks queued there + this prompt's blocks it lacks) + blocks it decodes

(docs.nvidia.com/dynamo, KV cache routing). Here it is given exact and immediate knowledge of every worker's cache and
queue, which no real router has; the command tries several weights and reports the best at each rate.
"""

from __future__ import annotations

from benchmarks.trace.engine import Job
from benchmarks.trace.requests import BLOCK, TraceRequest
from benchmarks.trace.simulate import Cluster, ClusterSpec
from serve_app.routing.types import Decision, WorkerLoad


class KVAware:
    """Every worker prefills and decodes and has its own cache."""

    def __init__(self, spec: ClusterSpec, overlap_weight: float, chunk: int | None = None) -> None:
        self.name = f"kv-router w={overlap_weight:g}"
        self.shared = False
        self.blocks = spec.blocks
        self._weight = overlap_weight
        self._chunk = chunk or spec.chunk
        if chunk:
            self.name += f" chunk={chunk}"

    def start(self, cluster: Cluster) -> None:
        self._cluster = cluster
        for worker in cluster.workers:
            cluster.deploy(worker.index, "mixed", chunk=self._chunk)

    def arrive(self, request: TraceRequest, now: float) -> None:
        best, least = 0, float("inf")
        for worker in self._cluster.workers:
            cached = self._cluster.caches.by_worker[worker.index].look(request.blocks)
            new = (worker.queued_tokens + max(request.prompt - cached * BLOCK, 1)) / BLOCK
            active = (
                worker.kv + sum(j.prompt for j in worker.queue) + sum(j.prompt for j in worker.prefilling)
            ) / BLOCK
            cost = self._weight * new + active
            if cost < least:
                best, least = worker.index, cost
        self._cluster.dispatch(request, Decision(str(best), None, 0.0, 0.0, 0))

    def report(self, load: WorkerLoad) -> None:
        pass

    def renew(self) -> None:
        pass

    def started(self, job: Job) -> None:
        pass

    def finished(self, job: Job) -> None:
        pass
