"""What the product is compared with: a KV-aware router over per-worker caches, after Dynamo's published cost function.

    cost(worker) = overlap_weight · (prefill blocks queued there + this prompt's blocks it lacks) + blocks it decodes

(docs.nvidia.com/dynamo, KV cache routing). Here it is given exact and immediate knowledge of every worker's cache and
queue, which no real router has; the command tries several weights and reports the best at each rate. With ``queue``
requests wait at the router while all workers have more prompt tokens queued than that many of their steps take, and
those with the fewest tokens to compute go first (its queue with the policy of the weighted shortest processing time).

With ``prefill`` workers the others only decode: the KV-aware choice is among the prefill workers, which share all of
the cache; the decode worker with the fewest blocks takes the prompt over, straight from the prefill worker, in layers
while it is computed.
"""

from __future__ import annotations

from heapq import heappop, heappush

from benchmarks.trace.engine import EngineModel, Job
from benchmarks.trace.requests import BLOCK, TraceRequest
from benchmarks.trace.simulate import Cluster
from benchmarks.trace.spec import ClusterSpec
from serve_app.routing.types import Decision, WorkerLoad


class KVAware:
    """``prefill`` 0: every worker prefills and decodes, and has its own cache."""

    shared = False
    zoned = False

    def __init__(
        self,
        spec: ClusterSpec,
        overlap_weight: float,
        *,
        chunk: int | None = None,
        queue: float = 0.0,
        prefill: int = 0,
    ) -> None:
        self.blocks = spec.blocks
        self.cached_by = list(range(prefill))
        self._weight, self._chunk, self._queue = overlap_weight, chunk or spec.chunk, queue
        split = f" {prefill}P{spec.workers - prefill}D" if prefill else ""
        self.name = f"kv-router{split} w={overlap_weight:g} chunk={self._chunk}" + (
            f" queue={queue:g}" if queue else ""
        )
        self._waiting: list[tuple[int, int, TraceRequest]] = []
        self._arrived = 0

    def start(self, cluster: Cluster) -> None:
        self._cluster = cluster
        for worker in cluster.workers:
            role = "mixed" if not self.cached_by else "prefill" if worker.index in self.cached_by else "decode"
            cluster.deploy(worker.index, role, chunk=self._chunk)
        self._able = [w for w in cluster.workers if w.role != "decode"]
        self._decode = [w for w in cluster.workers if w.role == "decode"]
        self._on_way: dict[int, int] = {}  # prompt tokens that have been sent and are not there yet

    def arrive(self, request: TraceRequest, now: float) -> None:
        self._arrived += 1
        missing = request.prompt - max(self._cached(w, request) for w in self._able)
        heappush(self._waiting, (missing if self._queue else self._arrived, self._arrived, request))
        self._next()

    def _next(self) -> None:
        while self._waiting and not (self._queue and self._all_busy()):
            self._send(heappop(self._waiting)[2])

    def _all_busy(self) -> bool:
        return all(self._queued(w) > self._queue * w.chunk for w in self._able)

    def _cached(self, worker: EngineModel, request: TraceRequest) -> int:
        held = self._cluster.caches.by_worker[worker.index].look(request.blocks)
        return min(held * BLOCK, request.prompt - 1)

    def _queued(self, worker: EngineModel) -> int:
        return worker.queued_tokens + self._on_way.get(worker.index, 0)

    def _send(self, request: TraceRequest) -> None:
        best, least, lacking = self._able[0], float("inf"), 0
        for worker in self._able:
            missing = max(request.prompt - self._cached(worker, request), 1)
            cost = self._weight * (self._queued(worker) + missing) / BLOCK + _held(worker) / BLOCK
            if cost < least:
                best, least, lacking = worker, cost, missing
        self._on_way[best.index] = self._on_way.get(best.index, 0) + lacking
        self._cluster.after((2 if self._decode else 1) * self._cluster.spec.call_s, self._there, best.index, lacking)
        decode = min(self._decode, key=lambda w: _held(w) + w.coming, default=best)
        prefill = None if decode is best else str(best.index)
        self._cluster.dispatch(request, Decision(str(decode.index), prefill, 0.0, 0.0, 0))

    def _there(self, worker: int, tokens: int, now: float) -> None:
        self._on_way[worker] -= tokens

    def report(self, load: WorkerLoad) -> None:
        self._next()

    def renew(self) -> None:
        pass

    def started(self, job: Job) -> None:
        self._next()

    def finished(self, job: Job) -> None:
        self._next()


def _held(worker: EngineModel) -> int:
    """Tokens of context that a worker decodes, or will."""
    return worker.kv + sum(j.prompt for group in (worker.queue, worker.prefilling, worker.landing) for j in group)
