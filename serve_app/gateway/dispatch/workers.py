"""The workers of one model as one gateway hears of them: loads, roles, and how many replicas would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve_app.catalog.records import Profile
from serve_app.channel.load import LoadReport
from serve_app.routing.fairness import FairQueue
from serve_app.routing.planner import DemandMeter, Plan, Planner, PlannerConfig, StageLimits
from serve_app.routing.router import Router
from serve_app.routing.types import FetchSample, Role, StepSample, WorkerLoad

PLAN_S = 1.0
# A worker that has not been heard of for three heartbeats gets nothing new until it is.
SILENT_S = 6.0


class Workers:
    """``report`` what workers say; the router knows of them what it needs to choose.

    A worker is known by the id of its Serve replica, which stays when the replica starts another process.

    Of several gateways one plans the roles, which workers name in their reports (``name()``: what they call this
    one); to the others a worker is what it reports to be. Two plans at once would take each other's workers.
    """

    def __init__(
        self,
        profile: Profile,
        router: Router,
        queue: FairQueue,
        clock: Callable[[], float],
        name: Callable[[], str] = lambda: "",
    ) -> None:
        limits = {
            name: StageLimits(stage.min_replicas, stage.max_replicas)
            for name, stage in profile.stages.items()
            if name in ("prefill", "decode")
        }
        wanted = {"ttft_target": profile.targets.ttft_s, "itl_target": profile.targets.itl_s}
        config = PlannerConfig(limits=limits, **{k: v for k, v in wanted.items() if v is not None})
        self._profile = profile
        self._router = router
        self._queue = queue
        self._clock = clock
        self._name = name
        self._planning = True
        self._gateways = 1
        self._planner = Planner(router.costs, config)
        self.demand = DemandMeter()
        self._plan: Plan | None = None
        self._planned_at = clock()
        self.roles: dict[str, Role] = {}  # as planned here; none while another gateway plans
        self._stages: dict[str, str] = {}  # the deployment a worker belongs to
        self._processes: dict[str, str] = {}  # the process that reports for it now

    @property
    def loads(self) -> list[WorkerLoad]:
        """Those that requests can be sent to."""
        return [worker.load for worker in self._router.fleet.workers.values()]

    @property
    def stages(self) -> set[str]:
        """Stages of which a worker can be sent to."""
        return {self._stages[load.worker] for load in self.loads}

    def stage(self, worker: str) -> str:
        """The stage a worker belongs to; "" for one that has never reported."""
        return self._stages.get(worker, "")

    def report(self, process: str, report: LoadReport) -> None:
        now, worker = self._clock(), report.replica
        self._stages[worker] = report.stage
        self._processes[worker] = process
        self._gateways = max(1, report.gateways)
        self._planning = report.planner in ("", self._name())
        if not self._planning:
            self._plan, self.roles = None, {}
        self._router.report(_load(report, self.roles.get(worker), now))
        if now - self._planned_at >= PLAN_S:
            self._planned_at = now
            self._review(now)

    def lost(self, process: str) -> None:
        """A worker's connection has ended: nothing goes there until it, or its successor, reports again."""
        for worker in [w for w, p in self._processes.items() if p == process]:
            self.forget(worker)

    def forget(self, worker: str) -> None:
        self._router.remove(worker)
        self._processes.pop(worker, None)

    def needed(self) -> dict[str, float]:
        """Replicas of each stage that this gateway's requests need, as fractions."""
        demand = self.demand.demand(self._clock())
        needs = self._planner.needs(self.loads, demand, self._queue.waiting_tokens())
        if "prefill" in self._profile.stages:
            return needs
        return {"decode": sum(needs.values())}

    def _review(self, now: float) -> None:
        for load in self.loads:
            if now - load.reported_at > SILENT_S:
                self.forget(load.worker)
        loads = self.loads
        # Of replicas that have gone, the stage is still asked for while their requests are on their way.
        if len(self._stages) > 1000 + len(loads):
            self._stages = {load.worker: self._stages[load.worker] for load in loads}
        if len(loads) > 1 and self._planning:
            # Requests are spread evenly over the gateways: what comes here stands for what comes to the others.
            waiting = self._queue.waiting_tokens() * self._gateways
            demand = self.demand.demand(now) * self._gateways
            self._plan = self._planner.plan(loads, demand, now, waiting_tokens=waiting)
            self.roles = dict(self._plan.roles)

    # -- for people who look -------------------------------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            {
                "replica": load.worker,
                "stage": self.stage(load.worker),
                "role": load.role,
                "queued_tokens": load.queued_prefill_tokens,
                "running": load.running,
                "waiting": load.waiting,
                "kv_use": round(load.kv_blocks_used / max(1, load.kv_blocks_total), 3),
                "step_ms": round(load.step_seconds * 1e3, 2),
                "age_s": round(now - load.reported_at, 2),
            }
            for load in self.loads
        ]

    def planned(self) -> dict[str, Any]:
        """What the planner makes of it."""
        needed = {stage: round(replicas, 3) for stage, replicas in self.needed().items()}
        why = None if self._plan is None else self._plan.why
        return {"needed": needed, "why": why if self._planning else "another gateway plans"}


def _load(report: LoadReport, role: Role | None, now: float) -> WorkerLoad:
    return WorkerLoad(
        worker=report.replica,
        node=report.node,
        role=role or _role(report.role),
        queued_prefill_tokens=report.queued_tokens,
        running=report.running,
        waiting=report.waiting,
        max_seqs=max(1, report.max_seqs),
        kv_blocks_used=report.used_blocks,
        kv_blocks_total=max(1, report.total_blocks),
        block_tokens=max(1, report.block_tokens),
        max_batch_tokens=max(1, report.max_batch_tokens),
        step_seconds=report.step_seconds,
        draining=report.draining,
        steps=tuple(StepSample(*sample) for sample in report.steps),
        fetches=tuple(FetchSample(*sample) for sample in report.fetches),  # type: ignore[arg-type]
        reported_at=now,
    )


def _role(name: str) -> Role:
    return name if name in ("prefill", "decode", "mixed") else "mixed"  # type: ignore[return-value]
