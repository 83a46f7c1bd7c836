"""The discrete-event simulation: a trace's arrivals, gateways with the product's policy code, modelled engines.

What travels takes time as well. A worker reports to the gateways every ``report_s`` while something changes there, and
every ``heartbeat_s`` otherwise. Gateways look every ``renew_s`` whether the planned roles have changed, and tell the
workers. K/V crosses each worker's own link at ``link_bytes_s``, one transfer after the other. A request's adapter is
loaded where it is not in memory, beside the steps of others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from benchmarks.trace.caches import PoolCache, WorkerCache
from benchmarks.trace.engine import EngineModel, Job
from benchmarks.trace.measure import Result
from benchmarks.trace.requests import BLOCK, TraceRequest
from serve_app.routing.types import Decision, Refusal, Role, WorkerLoad


@dataclass(slots=True, frozen=True)
class ClusterSpec:
    """The machine, the same for every policy compared."""

    workers: int = 8
    blocks: int = 46_872  # of cache in all, 512 tokens each
    nodes: int = 1
    kv_tokens: int = 5_859 * BLOCK  # of running sequences, per worker
    max_seqs: int = 256
    chunk: int = 8192  # prompt tokens per step on workers of the prefill stage, or mixed ones
    decode_chunk: int = 4096  # on workers of the decode stage, as the record of an 8B model has it
    kv_token_bytes: int = 131_072  # 8B model, 8 KV heads, bfloat16
    link_bytes_s: float = 50e9  # host memory to GPU: PCIe 5.0 x16 as measured on H100 boards, one direction
    link_latency_s: float = 2e-3
    remote_bytes_s: float = 12.5e9  # from another node's pool: 100 Gbit/s
    early_handover: bool = True  # chunks go over while prefill computes, or all at its end
    report_s: float = 0.1
    heartbeat_s: float = 2.0
    renew_s: float = 0.5
    gateways: int = 1
    adapters: int = 32  # that a worker has in memory
    adapter_bytes: int = 50 << 20
    adapter_bytes_s: float = 1e9  # from the file store to a place in the model
    ttft_target: float = 5.0  # what goodput counts, and what admission holds
    itl_target: float = 0.05


class Policy(Protocol):
    """What decides in a simulation; ``Product`` and the baselines have this shape."""

    name: str
    shared: bool  # one pool per node, or a cache per worker
    blocks: int  # of cache in all

    def start(self, cluster: Cluster) -> None: ...
    def arrive(self, request: TraceRequest, now: float) -> None: ...
    def report(self, load: WorkerLoad) -> None: ...
    def renew(self) -> None: ...
    def started(self, job: Job) -> None: ...
    def finished(self, job: Job) -> None: ...


@dataclass(slots=True)
class Caches:
    """The holders of blocks: ``by_worker`` for caches of their own, ``by_node`` for pools."""

    by_worker: list[WorkerCache] = field(default_factory=list)
    by_node: list[PoolCache] = field(default_factory=list)


class Cluster:
    """Runs one policy over one trace. ``deploy``, ``dispatch``, ``refuse`` and ``set_role`` are the policy's levers."""

    def __init__(self, spec: ClusterSpec, policy: Policy, rate: float) -> None:
        self.spec = spec
        self.policy = policy
        self.now = 0.0
        self.result = Result(policy.name, rate)
        gaps = self.result.gaps
        self.workers = [EngineModel(i, spec.kv_tokens, spec.max_seqs, spec.chunk, gaps) for i in range(spec.workers)]
        self.caches = Caches()
        if policy.shared:
            self.caches.by_node = [PoolCache(max(1, policy.blocks // spec.nodes)) for _ in range(spec.nodes)]
        else:
            self.caches.by_worker = [WorkerCache(max(1, policy.blocks // spec.workers)) for _ in range(spec.workers)]
        self.adapters = [WorkerCache(spec.adapters) for _ in range(spec.workers)]
        self.jobs: dict[str, Job] = {}
        self._adapter_at: dict[tuple[int, bytes], float] = {}
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = 0
        self._token_s = spec.kv_token_bytes / spec.link_bytes_s
        self._remote_s = spec.kv_token_bytes / spec.remote_bytes_s

    # -- the policy's levers ---------------------------------------------------------------------------------------

    def dispatch(self, request: TraceRequest, decision: Decision, gateway: int = 0) -> None:
        """Sends a request off as decided."""
        decode = int(decision.decode)
        prefill = decode if decision.prefill is None else int(decision.prefill)
        job = Job(request.id, request.prompt, request.output, request.blocks, request.at, prefill, decode)
        job.gateway = gateway
        self.jobs[job.id] = job
        worker = self.workers[prefill]
        self._take_from_cache(job, worker)
        if request.adapter:
            # Generation begins later, and elsewhere: only where the prompt is computed does anybody wait.
            ready = max(self._load_adapter(request.adapter, index) for index in {prefill, decode})
            job.fetched_at = max(job.fetched_at, ready)
        worker.push(job)
        self.result.stayed += job.stays
        self._wake(worker)
        if job.fetched_at > self.now:
            self.at(job.fetched_at, "wake", prefill)

    def refuse(self, request: TraceRequest, refusal: Refusal) -> None:
        self.result.refused += 1

    def deploy(self, worker: int, role: Role, *, chunk: int | None = None) -> None:
        """At the start: the worker's stage gives it a role, and the prompt tokens of a step for good."""
        engine = self.workers[worker]
        engine.role = role
        engine.chunk = chunk or (self.spec.decode_chunk if role == "decode" else self.spec.chunk)

    def set_role(self, worker: int, role: Role) -> None:
        engine = self.workers[worker]
        if engine.role != role:
            self.result.role_moves += 1
        engine.role = role
        engine.changed = True

    def at(self, when: float, kind: str, what: Any = None) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, kind, what))

    def node_of(self, worker: int) -> int:
        return worker * self.spec.nodes // self.spec.workers

    def load_of(self, worker: EngineModel) -> WorkerLoad:
        """What the worker would report now; blocks of one token, so nothing is rounded.

        As in the product, what is still prefilled or fetched elsewhere is not known here yet.
        """
        staying = sum(j.stays for j in worker.queue if j.fetched_at <= self.now)
        return WorkerLoad(
            worker=str(worker.index),
            node=str(self.node_of(worker.index)),
            role=worker.role,
            queued_prefill_tokens=worker.queued_tokens,
            running=worker.batch + sum(j.stays for j in worker.prefilling),
            waiting=staying + len(worker.landing),
            max_seqs=worker.max_seqs,
            kv_blocks_used=worker.kv + sum(j.prompt for j in worker.prefilling),
            kv_blocks_total=worker.kv_total,
            block_tokens=1,
            max_batch_tokens=worker.chunk,
            steps=(worker.sample,) if worker.sample is not None else (),
            adapters=frozenset(self.adapters[worker.index].held),
            reported_at=self.now,
        )

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, trace: Sequence[TraceRequest]) -> Result:
        began = time.perf_counter()
        result, spec = self.result, self.spec
        self.policy.start(self)
        for worker in self.workers:
            self.policy.report(self.load_of(worker))
        for request in trace:
            self.at(request.at, "arrive", request)
        self.at(spec.renew_s, "renew")
        for worker in self.workers:
            self.at(spec.report_s * worker.index / spec.workers, "report", worker.index)
        left = len(trace)
        result.requests = left
        handlers = {"step": self._on_step, "wake": self._on_wake, "land": self._on_land}
        while self._events and left > result.refused + len(result.done):
            self.now, _, kind, what = heappop(self._events)
            if kind == "arrive":
                result.prompt_tokens += what.prompt
                self.policy.arrive(what, self.now)
            elif kind == "report":
                self._on_report(what)
            elif kind == "renew":
                self.policy.renew()
                self.at(self.now + spec.renew_s, "renew")
            elif kind == "call":
                what(self.now)
            else:
                handlers[kind](what)
        result.span = max(self.now, 1e-9)
        roles = [w.role for w in self.workers]
        result.roles = "/".join(str(roles.count(r)) for r in ("prefill", "decode", "mixed"))
        result.wall = time.perf_counter() - began
        return result

    def _on_report(self, index: int) -> None:
        worker = self.workers[index]
        if worker.changed or self.now >= worker.reported_at + self.spec.heartbeat_s:
            self.policy.report(self.load_of(worker))
            worker.sample, worker.reported_at = None, self.now
            # A queue goes on being worked off: the next report says so.
            worker.changed = worker.has_work
        self.at(self.now + self.spec.report_s, "report", index)

    def _on_wake(self, index: int) -> None:
        self._wake(self.workers[index])

    def _on_land(self, job: Job) -> None:
        worker = self.workers[job.decode]
        worker.land(job)
        self._wake(worker)

    def _on_step(self, what: tuple[int, int]) -> None:
        worker = self.workers[what[0]]
        if not worker.busy or worker.version != what[1]:
            return  # was cut short
        found = worker.end(self.now)
        for job in found.progressed:
            self._publish(job)
        for job in found.prefilled:
            target = self.workers[job.decode]
            seconds = self.spec.link_latency_s + job.prompt * self._token_s
            if self.spec.early_handover:
                # Chunks follow one another out of prefill; the last one can't leave before it is there.
                target.link_free = max(job.began, target.link_free) + seconds
                last = self.now + self.spec.link_latency_s + min(job.prompt, BLOCK) * self._token_s
                job.landed = max(target.link_free, last)
            else:
                target.link_free = job.landed = max(self.now, target.link_free) + seconds
            self.at(job.landed, "land", job)
        for job in found.started:
            self.result.ttft.append(job.first - job.at)
            self.result.cached_tokens += job.cached
            self.policy.started(job)
        for job in found.done:
            self._complete(job)
        self._wake(worker)

    def _complete(self, job: Job) -> None:
        result, spec = self.result, self.spec
        stream = (job.done - job.first) / max(job.output - 1, 1)
        result.stream.append(stream)
        result.output_tokens += job.output
        result.good += job.first - job.at <= spec.ttft_target and stream <= spec.itl_target
        result.done.append(job.id)
        del self.jobs[job.id]
        self.policy.finished(job)

    def _wake(self, worker: EngineModel) -> None:
        ends = worker.interrupt(self.now) if worker.busy else worker.begin(self.now)
        if ends is not None:
            self.at(ends, "step", (worker.index, worker.version))

    def _load_adapter(self, adapter: bytes, index: int) -> float:
        """When a worker has it in memory."""
        held, spec = self.adapters[index], self.spec
        there = held.match((adapter,)) > 0
        held.add((adapter,), 0, 1)
        self.workers[index].changed = True
        if there:
            return max(self.now, self._adapter_at.get((index, adapter), 0.0))
        self.result.adapter_loads += 1
        ready = self._adapter_at[index, adapter] = (
            self.now + spec.link_latency_s + spec.adapter_bytes / spec.adapter_bytes_s
        )
        return ready

    # -- caches --------------------------------------------------------------------------------------------------------

    def _take_from_cache(self, job: Job, worker: EngineModel) -> None:
        """Looks the prompt up where it is prefilled, and starts fetching what is worth it."""
        spec, now = self.spec, self.now
        if not self.policy.shared:
            held = self.caches.by_worker[worker.index].match(job.blocks)
            job.cached = job.computed = min(held * BLOCK, job.prompt - 1)
            job.fetched_at = now
            return
        node = self.node_of(worker.index)
        local = self.caches.by_node[node].match(job.blocks)
        tokens, seconds = min(local * BLOCK, job.prompt - 1), 0.0
        if tokens:
            seconds = spec.link_latency_s + tokens * self._token_s
        if len(self.caches.by_node) > 1:
            away = max(pool.match(job.blocks) for i, pool in enumerate(self.caches.by_node) if i != node)
            more = min(away * BLOCK, job.prompt - 1) - tokens
            if more > 0 and more * self._remote_s < more * 1.8e-5 * 4:
                seconds += spec.link_latency_s + more * self._remote_s
                tokens += more
        job.cached = job.computed = tokens
        job.fetched_at = now
        if tokens:
            worker.link_free = max(now, worker.link_free) + seconds
            job.fetched_at = worker.link_free
        job.published = min(local, len(job.blocks))

    def _publish(self, job: Job) -> None:
        """Blocks that a step has completed are there for others."""
        complete = len(job.blocks) if job.computed >= job.prompt else job.computed // BLOCK
        if complete <= job.published:
            return
        cache = (
            self.caches.by_node[self.node_of(job.prefill)] if self.policy.shared else self.caches.by_worker[job.prefill]
        )
        cache.add(job.blocks, job.published, complete)
        job.published = complete
