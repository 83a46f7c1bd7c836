"""The discrete-event simulation: a trace's arrivals, gateways with the product's policy code, modelled engines.

What travels takes time as well. A worker reports to the gateways every ``report_s`` while something changes there, and
every ``heartbeat_s`` otherwise. Gateways look every ``renew_s`` whether the planned roles have changed, and tell the
workers. Calls take ``call_s``, frames over connections that stand ``news_s``. K/V crosses each worker's own link at
``link_bytes_s``, one transfer after the other and each direction by itself: fetches and hand-overs in, what is
published out. Nobody can have a block before it is out. Between nodes it crosses the link of the node that it goes to.
A request's adapter is loaded where it is not in memory, beside the steps of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Protocol

from benchmarks.trace.caches import Caches, PoolCache, WorkerCache
from benchmarks.trace.engine import EngineModel, Job
from benchmarks.trace.measure import Result
from benchmarks.trace.requests import BLOCK, TraceRequest
from benchmarks.trace.spec import ClusterSpec, Link
from serve_app.costs.transfers import FetchSample, Tier, TierCost, Transfer
from serve_app.costs.zones import NEAR, SAME_REGION
from serve_app.kv.costs import FetchCosts
from serve_app.kv.directory_table import WORTH
from serve_app.routing.types import Decision, Refusal, Role, WorkerLoad

# Blocks from which on a pool counts as one without a limit, for whoever makes room for what is in it.
UNLIMITED = 200_000


class Policy(Protocol):
    """What decides in a simulation; ``Product`` and the baselines have this shape."""

    name: str
    shared: bool  # one pool per node, or a cache per worker
    blocks: int  # of cache in all
    cached_by: Sequence[int]  # the workers that have a cache of their own; empty: all
    zoned: bool  # it knows in which zone a worker or a request is

    def start(self, cluster: Cluster) -> None: ...
    def arrive(self, request: TraceRequest, now: float) -> None: ...
    def report(self, load: WorkerLoad) -> None: ...
    def renew(self) -> None: ...
    def started(self, job: Job) -> None: ...
    def finished(self, job: Job) -> None: ...


class Cluster:
    """Runs one policy over one trace. ``deploy``, ``dispatch``, ``refuse`` and ``set_role`` are the policy's levers."""

    def __init__(self, spec: ClusterSpec, policy: Policy, rate: float) -> None:
        self.spec = spec
        self.policy = policy
        self.now = 0.0
        self.result = Result(policy.name, rate)
        gaps = self.result.gaps
        self.workers = [EngineModel(i, spec, gaps) for i in range(spec.workers)]
        self.node_links = [Link(spec.remote_bytes_s) for _ in range(spec.nodes)]  # into each node
        self.zone_links = [Link(spec.zone_bytes_s) for _ in range(spec.zones)]  # into each zone
        # What each worker has learned of fetching and computing: the product's own rule.
        self._fetching = [FetchCosts() for _ in range(spec.workers)]
        for costs in self._fetching:
            guess = spec.guessed or 1.0
            costs.tiers |= {
                "node": Transfer(spec.link_latency_s, guess * spec.link_bytes_s),
                "remote": Transfer(2 * spec.link_latency_s, guess * min(spec.remote_bytes_s, spec.link_bytes_s)),
            }
        self.caches = Caches()
        if policy.shared:
            self.caches.by_node = [PoolCache(max(1, policy.blocks // spec.nodes)) for _ in range(spec.nodes)]
        else:
            having = set(policy.cached_by or range(spec.workers))
            each = max(1, policy.blocks // len(having))
            self.caches.by_worker = [WorkerCache(each if i in having else 0) for i in range(spec.workers)]
        self.adapters = [WorkerCache(spec.adapters) for _ in range(spec.workers)]
        self.jobs: dict[str, Job] = {}
        self._adapter_at: dict[tuple[int, bytes], float] = {}
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = 0
        self._bytes = spec.kv_token_bytes

    # -- the policy's levers ---------------------------------------------------------------------------------------

    def dispatch(self, request: TraceRequest, decision: Decision, gateway: int = 0) -> None:
        """Sends a request off as decided: to decode, which calls prefill."""
        decode = int(decision.decode)
        prefill = decode if decision.prefill is None else int(decision.prefill)
        job = Job(request.id, request.prompt, request.output, request.blocks, request.at, prefill, decode)
        job.gateway, job.adapter = gateway, request.adapter
        self.jobs[job.id] = job
        self.result.stayed += job.stays
        far = self.zone_of(decode) != self.spec.gateway_zone(gateway)
        self.result.far += far
        self.after(self.spec.call_s + far * self.spec.zone_latency_s, self._reach_decode, job)

    def _reach_decode(self, job: Job, now: float) -> None:
        if job.stays:
            self._reach_prefill(job, now)
            return
        worker = self.workers[job.decode]
        worker.coming += job.prompt
        worker.changed = True
        self.after(self.spec.call_s, self._reach_prefill, job)

    def _reach_prefill(self, job: Job, now: float) -> None:
        worker = self.workers[job.prefill]
        self._take_from_cache(job, worker)
        if job.adapter:
            # Generation begins later, and elsewhere: only where the prompt is computed does anybody wait.
            ready = max(self._load_adapter(job.adapter, index) for index in {job.prefill, job.decode})
            job.fetched_at = max(job.fetched_at, ready)
        worker.push(job)
        self._wake(worker)
        if job.fetched_at > now:
            self.at(job.fetched_at, "wake", job.prefill)

    def refuse(self, request: TraceRequest, refusal: Refusal) -> None:
        self.result.refused += 1

    def deploy(self, worker: int, role: Role, *, chunk: int | None = None) -> None:
        """At the start: a role, and the tokens of a step; without ``chunk`` steps are the product's, which keep to the
        target of gaps.
        """
        engine = self.workers[worker]
        engine.role, engine.chunk, engine.paced = role, chunk or self.spec.chunk, chunk is None

    def set_role(self, worker: int, role: Role) -> None:
        engine = self.workers[worker]
        if engine.role != role:
            self.result.role_moves += 1
        engine.role = role
        engine.changed = True

    def at(self, when: float, kind: str, what: Any = None) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, kind, what))

    def after(self, seconds: float, what: Callable[..., None], *of: Any) -> None:
        """Calls ``what(*of, now)`` then."""
        self.at(self.now + seconds, "call", partial(what, *of))

    def node_of(self, worker: int) -> int:
        return worker * self.spec.nodes // self.spec.workers

    def zone_of(self, worker: int) -> int:
        return self.spec.zone_of(self.node_of(worker))

    def load_of(self, worker: EngineModel) -> WorkerLoad:
        """What the worker would report now; blocks of one token, so nothing is rounded.

        As in the product, of what is still prefilled elsewhere a worker knows only that it will come over its link.
        """
        staying = sum(j.stays for j in worker.queue if j.fetched_at <= self.now)
        costs = self._fetching[worker.index].estimates()
        return WorkerLoad(
            worker=str(worker.index),
            node=str(self.node_of(worker.index)),
            zone=f"z{self.zone_of(worker.index)}" if self.policy.zoned else "",
            role=worker.role,
            queued_prefill_tokens=worker.queued_tokens,
            running=worker.batch + sum(j.stays for j in worker.prefilling),
            waiting=staying + len(worker.landing),
            max_seqs=worker.max_seqs,
            kv_blocks_used=worker.reserved,
            kv_blocks_total=worker.kv_total,
            block_tokens=1,
            max_batch_tokens=worker.step_tokens,
            incoming_tokens=round(worker.into.waiting(self.now) / self._bytes),
            steps=(worker.sample,) if worker.sample is not None else (),
            fetches=tuple(worker.fetches),
            tiers=tuple(TierCost(t, s, b * self._bytes) for t, (s, b) in costs.items() if self.spec.guessed),
            adapters=frozenset(self.adapters[worker.index].held),
            reported_at=self.now,
            pool="pool" if self.policy.shared else "",
            pool_tokens=min(self.policy.blocks // self.spec.nodes, UNLIMITED) * BLOCK if self.policy.shared else 0,
        )

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, trace: Sequence[TraceRequest], *, most_bad: int | None = None) -> Result:
        """``most_bad``: ends early once more requests than that have missed a target or were refused."""
        began = time.perf_counter()
        result = self.result
        self.begin(trace)
        while self._events and len(trace) > result.refused + len(result.done):
            self.step()
            if most_bad is not None and result.refused + len(result.done) - result.good > most_bad:
                break
        result.span = max(self.now, 1e-9)
        result.link_bytes = sum(w.into.moved for w in self.workers)
        roles = [w.role for w in self.workers]
        result.roles = "/".join(str(roles.count(r)) for r in ("prefill", "decode", "mixed"))
        result.wall = time.perf_counter() - began
        return result

    def begin(self, trace: Sequence[TraceRequest]) -> None:
        """Before the first :meth:`step`."""
        spec = self.spec
        self.policy.start(self)
        for worker in self.workers:
            self.policy.report(self.load_of(worker))
        for request in trace:
            self.at(request.at, "arrive", request)
        self.at(spec.renew_s, "renew")
        for worker in self.workers:
            self.at(spec.report_s * worker.index / spec.workers, "report", worker.index)
        self.result.requests = len(trace)
        self._handlers = {
            "step": self._on_step,
            "wake": self._on_wake,
            "land": self._on_land,
            "report": self._on_report,
        }

    @property
    def next_at(self) -> float:
        """When the next :meth:`step` is."""
        return self._events[0][0]

    def step(self) -> None:
        """What comes next."""
        self.now, _, kind, what = heappop(self._events)
        if kind == "arrive":
            self.result.prompt_tokens += what.prompt
            self.policy.arrive(what, self.now)
        elif kind == "renew":
            self.policy.renew()
            self.at(self.now + self.spec.renew_s, "renew")
        elif kind == "call":
            what(self.now)
        else:
            self._handlers[kind](what)

    def _on_report(self, index: int) -> None:
        worker = self.workers[index]
        if worker.changed or self.now >= worker.reported_at + self.spec.heartbeat_s:
            self.after(self.spec.news_s, self._told_load, self.load_of(worker))
            worker.sample, worker.reported_at = None, self.now
            worker.fetches.clear()
            # A queue goes on being worked off: the next report says so.
            worker.changed = worker.has_work
        self.at(self.now + self.spec.report_s, "report", index)

    def _told_load(self, load: WorkerLoad, now: float) -> None:
        load.reported_at = now
        self.policy.report(load)

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
        for job, tokens in found.progressed:
            self._publish(job, tokens)
        for job in found.prefilled:
            self._hand_over(job)
        for job in found.started:
            self.after(self.spec.news_s, self._told_started, job)
        for job in found.done:
            self.after(self.spec.news_s, self._told_done, job)
        if worker.prefilled_tokens:
            self._fetching[worker.index].prefill.add(worker.prefilled_tokens, worker.prefill_s)
        self._wake(worker)

    def _hand_over(self, job: Job) -> None:
        """Sends a prompt that has been computed to where it is decoded."""
        spec, target = self.spec, self.workers[job.decode]
        nbytes = job.prompt * self._bytes
        target.coming -= job.prompt
        # Chunks follow one another out of prefill; the last one can't leave before it is there.
        start = job.began if spec.early_handover else job.copied
        arrived = target.into.take(start, nbytes)
        if not self.policy.shared:
            arrived = max(arrived, self.workers[job.prefill].out.take(start, nbytes))
        node = self.node_of(job.decode)
        if node != self.node_of(job.prefill):
            arrived = max(arrived, self._between(self.node_of(job.prefill), node, start, nbytes))
        last = job.copied + min(job.prompt, BLOCK) * self._bytes / spec.link_bytes_s
        job.landed = max(arrived, last) + spec.link_latency_s
        self.at(job.landed, "land", job)

    def _told_started(self, job: Job, now: float) -> None:
        self.result.ttft.append(now - job.at)
        self.result.cached_tokens += job.cached
        self.policy.started(job)

    def _told_done(self, job: Job, now: float) -> None:
        result, spec = self.result, self.spec
        stream = (job.done - job.first) / max(job.output - 1, 1)
        result.stream.append(stream)
        result.output_tokens += job.output
        result.good += job.first + spec.news_s - job.at <= spec.ttft_target and stream <= spec.itl_target
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
        now = self.now
        if not self.policy.shared:
            held = self.caches.by_worker[worker.index].match(job.blocks)
            job.cached = job.computed = min(held * BLOCK, job.prompt - 1)
            job.published, job.fetched_at = held, now
            return
        node, most = self.node_of(worker.index), job.prompt - 1
        held = self.caches.by_node[node].match(job.blocks)
        job.fetched_at = now
        tokens = self._fetch("node", job, worker, 0, min(held * BLOCK, most))
        if len(self.caches.by_node) > 1 and tokens == min(held * BLOCK, most):
            held_at = ((pool.match(job.blocks), i) for i, pool in enumerate(self.caches.by_node) if i != node)
            away, other = max(held_at, key=lambda found: found[0] * self._worth(node, found[1]))
            tokens += self._fetch("remote", job, worker, tokens, min(away * BLOCK, most) - tokens, other)
        job.cached = job.computed = tokens
        job.published = min(held, len(job.blocks))

    def _worth(self, node: int, other: int) -> float:
        """Of a block in another node's pool, as the directory counts it."""
        apart = self.policy.zoned and self.spec.zone_of(node) != self.spec.zone_of(other)
        return WORTH[SAME_REGION if apart else NEAR]

    def _between(self, node: int, other: int, at: float, nbytes: int) -> float:
        """When ``nbytes`` from ``node`` have come to ``other``."""
        arrived = self.node_links[other].take(at, nbytes)
        zone = self.spec.zone_of(other)
        if zone == self.spec.zone_of(node):
            return arrived
        self.result.zone_bytes += nbytes
        return max(arrived, self.zone_links[zone].take(at, nbytes)) + self.spec.zone_latency_s

    def _fetch(self, tier: Tier, job: Job, worker: EngineModel, behind: int, tokens: int, other: int = 0) -> int:
        """Fetches ``tokens`` of a prompt ``behind`` others, if the worker finds that it pays; returns how many.
        ``other``: the node that has them, if that is another.
        """
        nbytes = tokens * self._bytes
        costs, waiting = self._fetching[worker.index], round(worker.into.waiting(self.now))
        busy_s = worker.queued_tokens * costs.token_seconds
        if tokens <= 0 or not costs.worth(tier, tokens, nbytes, waiting, busy_s):
            return 0
        arrived = worker.into.take(self.now, nbytes)
        if tier == "remote":
            arrived = max(arrived, self._between(other, self.node_of(worker.index), self.now, nbytes))
        job.fetched_at = arrived + self.spec.link_latency_s
        if self.spec.guessed:
            self.at(job.fetched_at, "call", partial(self._measured, worker, tier, tokens, job.fetched_at - self.now))
        return tokens

    def _measured(self, worker: EngineModel, tier: Tier, tokens: int, seconds: float, now: float) -> None:
        """As in the product, what was queued before it counts as time of a fetch."""
        self._fetching[worker.index].measured(tier, tokens * self._bytes, seconds)
        worker.fetches.append(FetchSample(tier, tokens, seconds))

    def _publish(self, job: Job, tokens: int) -> None:
        """``tokens`` of a prompt that a step has computed leave the worker; then their blocks are there for others."""
        if not self.policy.shared:
            # Its own memory: they are there at once, and leave with the hand-over.
            job.copied = self.now
            self._add(job.prefill, job, job.computed, self.now)
            return
        job.copied = self.workers[job.prefill].out.take(self.now, tokens * self._bytes)
        self.at(job.copied, "call", partial(self._add, job.prefill, job, job.computed))

    def _add(self, worker: int, job: Job, computed: int, now: float) -> None:
        complete = len(job.blocks) if computed >= job.prompt else computed // BLOCK
        if complete <= job.published:
            return
        cache = self.caches.by_node[self.node_of(worker)] if self.policy.shared else self.caches.by_worker[worker]
        cache.add(job.blocks, job.published, complete)
        job.published = complete
