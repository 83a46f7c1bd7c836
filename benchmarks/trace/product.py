"""The product's policy in the simulation: gateways drive the dispatch that the product's gateways drive.

Of several gateways one owns the model's dispatch, and the others pass their requests to it over a connection that
stands, as in the product; or each has a dispatch of its own, as while there is no owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.trace.engine import Job
from benchmarks.trace.requests import BLOCK, TraceRequest
from benchmarks.trace.simulate import Cluster
from benchmarks.trace.spec import ClusterSpec
from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.costs import CostPriors
from serve_app.routing.dispatch import Dispatch, DispatchConfig, Effects
from serve_app.routing.prices import RouterConfig
from serve_app.routing.types import Decision, Role, RouteRequest, WorkerLoad

# More than any answer in the trace: clients that set no limit.
MAX_TOKENS = 4096


class _Dispatcher:
    """One dispatch, the requests that wait in it, and its timer. ``far_s``: to gateways that do not have it."""

    def __init__(self, dispatch: Dispatch, cluster: Cluster, blind: bool) -> None:
        self.dispatch = dispatch
        self._blind = blind
        self._cluster = cluster
        self._waiting: dict[str, tuple[TraceRequest, int, float]] = {}
        self._timer = False

    def arrive(self, request: TraceRequest, gateway: int, far_s: float, now: float) -> None:
        self._waiting[request.id] = request, gateway, far_s
        routed = RouteRequest(
            request.id,
            request.prompt,
            request.blocks,
            max_tokens=MAX_TOKENS,
            tenant=request.tenant,
            arrived_at=request.at,
        )
        if self._cluster.policy.zoned and self._cluster.spec.zones > 1:
            routed.zone = f"z{self._cluster.spec.gateway_zone(gateway)}"
        if request.adapter and not self._blind:
            routed.adapter, routed.adapter_bytes = request.adapter, self._cluster.spec.adapter_bytes
        self.apply(self.dispatch.arrive(routed, now))

    def apply(self, effects: Effects) -> None:
        """Sends off the requests that have had their turn, and sets the timer."""
        cluster = self._cluster
        for turn in effects.turns:
            request, gateway, far_s = self._waiting.pop(turn.request_id)
            if turn.refusal is not None:
                cluster.refuse(request, turn.refusal)
                continue
            assert turn.decision is not None  # every worker reports before the first request
            if far_s:
                cluster.after(far_s, self._send, request, turn.decision, gateway)
            else:
                cluster.dispatch(request, turn.decision, gateway)
        if effects.tick_at is not None and not self._timer:
            self._timer = True
            cluster.at(effects.tick_at, "call", self._tick)

    def _send(self, request: TraceRequest, decision: Decision, gateway: int, now: float) -> None:
        self._cluster.dispatch(request, decision, gateway)

    def _tick(self, now: float) -> None:
        self._timer = False
        self.apply(self.dispatch.tick(now))


class Product:
    """``roles``: None lets the first gateway's planner move them; otherwise fixed, one per worker. ``blind``: the
    router does not know that requests have adapters. ``zoned``: it knows zones.
    """

    def __init__(
        self,
        name: str,
        spec: ClusterSpec,
        *,
        blocks: int | None = None,
        roles: Sequence[Role] | None = None,
        router: RouterConfig | None = None,
        admit: bool = True,
        blind: bool = False,
        zoned: bool = True,
    ) -> None:
        self.name = name
        self.shared = True
        self.zoned = zoned
        self.blocks = spec.blocks if blocks is None else blocks
        self.cached_by: Sequence[int] = ()
        self.dispatchers: list[_Dispatcher] = []
        self._spec = spec
        self._roles = roles
        self._blind = blind
        self._router = router or RouterConfig(chunk_tokens=BLOCK)
        self._targets = Targets(spec.ttft_target if admit else None, spec.itl_target)
        self._next = 0

    def start(self, cluster: Cluster) -> None:
        spec = self._spec
        self._cluster = cluster
        node = spec.kv_token_bytes / spec.link_bytes_s
        remote = spec.kv_token_bytes / spec.remote_bytes_s
        latency = spec.link_latency_s
        known = CostPriors(
            fetch_latency={"worker": 0.0, "node": latency, "remote": latency, "disk": 0.01, "adapter": latency},
            fetch_token={
                "worker": 0.0,
                "node": node,
                "remote": remote,
                "disk": 1.0,
                "adapter": 1 / spec.adapter_bytes_s,
            },
        )
        priors = CostPriors() if spec.guessed else known
        config = DispatchConfig(admission=AdmissionConfig(self._targets), priors=priors, router=self._router)
        for number in range(1 if spec.owner else spec.gateways):
            router = replace(config.router, seed=config.router.seed + number)
            self.dispatchers.append(_Dispatcher(Dispatch(replace(config, router=router)), cluster, self._blind))
        half = spec.workers // 2
        roles = self._roles or ["prefill"] * half + ["decode"] * (spec.workers - half)
        for index, role in enumerate(roles):
            cluster.deploy(index, role)

    def arrive(self, request: TraceRequest, now: float) -> None:
        gateway = self._next % self._spec.gateways
        self._next += 1
        far_s = self._far(gateway)
        if far_s:
            self._cluster.after(far_s, self._at(gateway).arrive, request, gateway, far_s)
        else:
            self._at(gateway).arrive(request, gateway, far_s, now)

    def report(self, load: WorkerLoad) -> None:
        for number, one in enumerate(self.dispatchers):
            planning = self._roles is None and number == 0
            gateways = len(self.dispatchers)
            one.apply(one.dispatch.report(load.worker, load, load.reported_at, planning=planning, gateways=gateways))

    def renew(self) -> None:
        for worker, role in self.dispatchers[0].dispatch.workers.roles.items():
            self._cluster.set_role(int(worker), role)

    def started(self, job: Job) -> None:
        self._tell(job, self._started)

    def finished(self, job: Job) -> None:
        self._tell(job, self._finished)

    def _at(self, gateway: int) -> _Dispatcher:
        """Where the gateway's requests wait."""
        return self.dispatchers[gateway % len(self.dispatchers)]

    def _far(self, gateway: int) -> float:
        """Seconds from the gateway to where its requests wait."""
        return self._spec.news_s if self._spec.owner and gateway else 0.0

    def _tell(self, job: Job, what: Callable[[Job, float], None]) -> None:
        far_s = self._far(job.gateway)
        if far_s:
            self._cluster.after(far_s, what, job)
        else:
            what(job, self._cluster.now)

    def _started(self, job: Job, now: float) -> None:
        self._at(job.gateway).dispatch.started(job.id, now)

    def _finished(self, job: Job, now: float) -> None:
        one = self._at(job.gateway)
        one.dispatch.stream_ended(job.id)
        one.apply(one.dispatch.finish(job.id, now, cached=job.cached, output=job.output))
