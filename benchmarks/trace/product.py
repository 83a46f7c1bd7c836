"""The product's policy in the simulation: its own router, admission, fair queue and planner, with nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.trace.engine import Job
from benchmarks.trace.requests import BLOCK, TraceRequest
from benchmarks.trace.simulate import Cluster, ClusterSpec
from serve_app.routing.admission import Admission, AdmissionConfig, Targets
from serve_app.routing.costs import CostModel, CostPriors
from serve_app.routing.fairness import FairConfig, FairQueue
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.planner import Demand, DemandMeter, Planner, PlannerConfig
from serve_app.routing.router import Router, RouterConfig
from serve_app.routing.types import Refusal, Role, RouteRequest, WorkerLoad

RETRY_S = 0.01


@dataclass(slots=True)
class _Gateway:
    router: Router
    queue: FairQueue
    admission: Admission
    meter: DemandMeter
    requests: dict[str, TraceRequest] = field(default_factory=dict)
    output_mean: float = 256.0
    retrying: bool = False


class Product:
    """``roles``: None lets the planner move them; otherwise fixed, one per worker."""

    def __init__(
        self,
        name: str,
        spec: ClusterSpec,
        *,
        blocks: int | None = None,
        roles: Sequence[Role] | None = None,
        router: RouterConfig | None = None,
        admit: bool = True,
        window_s: float = 0.15,
        planner: PlannerConfig | None = None,
        fair: FairConfig | None = None,
    ) -> None:
        self.name = name
        self.shared = True
        self.blocks = spec.blocks if blocks is None else blocks
        self._spec = spec
        self._roles = roles
        self._router = router or RouterConfig(chunk_tokens=BLOCK)
        self._admit = admit
        self._window = window_s
        self._fair = fair
        self._planner_config = planner or PlannerConfig(ttft_target=spec.ttft_target, itl_target=spec.itl_target)
        self._loads: dict[str, WorkerLoad] = {}
        self._next = 0

    def start(self, cluster: Cluster) -> None:
        spec = self._spec
        self._cluster = cluster
        node = spec.kv_token_bytes / spec.link_bytes_s
        remote = spec.kv_token_bytes / spec.remote_bytes_s
        latency = spec.link_latency_s
        priors = CostPriors(
            fetch_latency={"worker": 0.0, "node": latency, "remote": latency, "disk": 0.01},
            fetch_token={"worker": 0.0, "node": node, "remote": remote, "disk": 1.0},
        )
        self._gateways = []
        for number in range(spec.gateways):
            config = self._router
            router = Router(
                CostModel(priors),
                LocalityIndex(200_000),
                RouterConfig(**{**_fields(config), "seed": config.seed + number}),
            )
            queue = FairQueue(self._fair, router.expected_cached)
            targets = Targets(spec.ttft_target if self._admit else None, spec.itl_target)
            admission = Admission(router, queue, AdmissionConfig(targets, window_s=self._window))
            self._gateways.append(_Gateway(router, queue, admission, DemandMeter()))
        self._planner = Planner(self._gateways[0].router.costs, self._planner_config)
        if self._roles is not None:
            for index, role in enumerate(self._roles):
                cluster.set_role(index, role)
            cluster.result.role_moves = 0
        else:
            half = spec.workers // 2
            for index in range(spec.workers):
                cluster.set_role(index, "prefill" if index < half else "decode")
            cluster.result.role_moves = 0

    def arrive(self, request: TraceRequest, now: float) -> None:
        gateway = self._gateways[self._next % len(self._gateways)]
        self._next += 1
        routed = RouteRequest(
            request.id,
            request.prompt,
            request.blocks,
            expected_output_tokens=int(gateway.output_mean),
            max_tokens=4096,
            tenant=request.tenant,
            arrived_at=now,
        )
        refusal = gateway.admission.consider(routed, now)
        if refusal is not None:
            self._cluster.refuse(request, refusal)
            return
        gateway.requests[request.id] = request
        gateway.queue.push(routed)
        self._drain(gateway, now)

    def _drain(self, gateway: _Gateway, now: float) -> None:
        while (routed := gateway.queue.pop(now)) is not None:
            placed = gateway.admission.place(routed, now)
            if placed is None:
                gateway.queue.push(routed, front=True)
                self._retry(gateway, now)
                return
            request = gateway.requests.pop(routed.id)
            if isinstance(placed, Refusal):
                gateway.queue.settle(routed.id, 0, 0, 0)
                self._cluster.refuse(request, placed)
                continue
            gateway.meter.arrived(now, placed.compute, gateway.output_mean, routed.prompt_tokens)
            self._cluster.dispatch(request, placed, self._gateways.index(gateway))

    def _retry(self, gateway: _Gateway, now: float) -> None:
        if gateway.retrying:
            return
        gateway.retrying = True

        def again(when: float) -> None:
            gateway.retrying = False
            self._drain(gateway, when)

        self._cluster.at(now + RETRY_S, "call", again)

    def report(self, load: WorkerLoad) -> None:
        self._loads[load.worker] = load
        for gateway in self._gateways:
            gateway.router.report(load)

    def tick(self, now: float) -> None:
        if self._roles is not None:
            return
        demand = Demand(0.0, 0.0, 0.0)
        for gateway in self._gateways:
            demand = demand + gateway.meter.demand(now)
        waiting = sum(g.admission.queue.waiting_tokens() for g in self._gateways)
        plan = self._planner.plan(self._loads.values(), demand, now, waiting_tokens=waiting)
        for name in plan.moved:
            self._cluster.set_role(int(name), plan.roles[name])

    def started(self, job: Job) -> None:
        self._gateways[job.gateway].admission.started(job.id)

    def finished(self, job: Job) -> None:
        gateway = self._gateways[job.gateway]
        gateway.output_mean += 0.02 * (job.output - gateway.output_mean)
        gateway.admission.finished(job.id)
        gateway.queue.settle(job.id, job.prompt - job.cached, job.cached, job.output)

    def evicted(self, blocks: Sequence[bytes], holder: str) -> None:
        # Gateways are not told: their index is approximate, as in the product.
        pass


def _fields(config: RouterConfig) -> dict:
    return {name: getattr(config, name) for name in RouterConfig.__slots__}
