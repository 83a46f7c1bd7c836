"""The product's policy in the simulation: each gateway drives the dispatch that the product's gateways drive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.trace.engine import Job
from benchmarks.trace.requests import BLOCK, TraceRequest
from benchmarks.trace.simulate import Cluster, ClusterSpec
from serve_app.routing.admission import AdmissionConfig, Targets
from serve_app.routing.costs import CostPriors
from serve_app.routing.dispatch import Dispatch, DispatchConfig, Effects
from serve_app.routing.router import RouterConfig
from serve_app.routing.types import Role, RouteRequest, WorkerLoad

# More than any answer in the trace: clients that set no limit.
MAX_TOKENS = 4096


class _Gateway:
    """One gateway's dispatch, its requests that wait, and its timer."""

    def __init__(self, number: int, dispatch: Dispatch, cluster: Cluster, blind: bool) -> None:
        self.dispatch = dispatch
        self._blind = blind
        self._number = number
        self._cluster = cluster
        self._waiting: dict[str, TraceRequest] = {}
        self._timer = False

    def arrive(self, request: TraceRequest, now: float) -> None:
        self._waiting[request.id] = request
        routed = RouteRequest(
            request.id, request.prompt, request.blocks, max_tokens=MAX_TOKENS, tenant=request.tenant, arrived_at=now
        )
        if request.adapter and not self._blind:
            routed.adapter, routed.adapter_bytes = request.adapter, self._cluster.spec.adapter_bytes
        self.apply(self.dispatch.arrive(routed, now))

    def apply(self, effects: Effects) -> None:
        """Sends off the requests that have had their turn, and sets the timer."""
        for turn in effects.turns:
            request = self._waiting.pop(turn.request_id)
            if turn.refusal is not None:
                self._cluster.refuse(request, turn.refusal)
                continue
            assert turn.decision is not None  # every worker reports before the first request
            self._cluster.dispatch(request, turn.decision, self._number)
        if effects.tick_at is not None and not self._timer:
            self._timer = True
            self._cluster.at(effects.tick_at, "call", self._tick)

    def _tick(self, now: float) -> None:
        self._timer = False
        self.apply(self.dispatch.tick(now))


class Product:
    """``roles``: None lets the first gateway's planner move them; otherwise fixed, one per worker. ``blind``: the
    router does not know that requests have adapters.
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
    ) -> None:
        self.name = name
        self.shared = True
        self.blocks = spec.blocks if blocks is None else blocks
        self.gateways: list[_Gateway] = []
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
        config = DispatchConfig(
            admission=AdmissionConfig(self._targets),
            priors=CostPriors(
                fetch_latency={"worker": 0.0, "node": latency, "remote": latency, "disk": 0.01, "adapter": latency},
                fetch_token={
                    "worker": 0.0,
                    "node": node,
                    "remote": remote,
                    "disk": 1.0,
                    "adapter": 1 / spec.adapter_bytes_s,
                },
            ),
            router=self._router,
        )
        for number in range(spec.gateways):
            router = replace(config.router, seed=config.router.seed + number)
            self.gateways.append(_Gateway(number, Dispatch(replace(config, router=router)), cluster, self._blind))
        half = spec.workers // 2
        roles = self._roles or ["prefill"] * half + ["decode"] * (spec.workers - half)
        for index, role in enumerate(roles):
            cluster.deploy(index, role)

    def arrive(self, request: TraceRequest, now: float) -> None:
        gateway = self.gateways[self._next % len(self.gateways)]
        self._next += 1
        gateway.arrive(request, now)

    def report(self, load: WorkerLoad) -> None:
        for number, gateway in enumerate(self.gateways):
            planning = self._roles is None and number == 0
            gateway.apply(
                gateway.dispatch.report(
                    load.worker, load, load.reported_at, planning=planning, gateways=len(self.gateways)
                )
            )

    def renew(self) -> None:
        for worker, role in self.gateways[0].dispatch.workers.roles.items():
            self._cluster.set_role(int(worker), role)

    def started(self, job: Job) -> None:
        self.gateways[job.gateway].dispatch.started(job.id, self._cluster.now)

    def finished(self, job: Job) -> None:
        gateway, now = self.gateways[job.gateway], self._cluster.now
        gateway.dispatch.stream_ended(job.id)
        gateway.apply(gateway.dispatch.finish(job.id, now, cached=job.cached, output=job.output))
