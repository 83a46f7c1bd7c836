"""The workers of one model as one gateway hears of them: loads, preferred roles, and the replicas that demand needs."""

from __future__ import annotations

import math
from dataclasses import replace

from serve_app.routing.fairness import FairQueue
from serve_app.routing.planner import DemandMeter, Planner, RolePlan
from serve_app.routing.router import Router
from serve_app.routing.types import Role, RouteRequest, WorkerLoad

PLAN_S = 1.0
# A worker that has not been heard of for three heartbeats gets nothing new until it is.
SILENT_S = 6.0
# Stages of replicas that have gone, kept while their requests may still be on their way.
_GONE = 1000


class Workers:
    """``report`` what workers say; the router learns of it what it needs to choose.

    A worker is known by the id of its Serve replica, which stays when the replica starts another process.

    Of several gateways one plans the roles; the others take a worker to be what it reports. Two plans at once would
    take each other's workers.
    """

    def __init__(self, router: Router, queue: FairQueue, planner: Planner, *, prefill_stage: bool) -> None:
        self._router = router
        self._queue = queue
        self._planner = planner
        self._prefill_stage = prefill_stage
        self._planning = True
        self._gateways = 1
        self._planned_at = -math.inf
        self._stages: dict[str, str] = {}  # the deployment a worker belongs to
        self._processes: dict[str, str] = {}  # the process that reports for it now
        # Those that end what they have: requests are there, and none is sent there.
        self.leaving: set[str] = set()
        self.demand = DemandMeter()
        # Replicas that batches need beside, so that they are done by their deadlines.
        self.batch_needed = 0.0
        self.plan: RolePlan | None = None
        self.roles: dict[str, Role] = {}  # as planned here; none while another gateway plans

    @property
    def loads(self) -> list[WorkerLoad]:
        """Of the workers that requests can be sent to."""
        return [worker.load for worker in self._router.fleet.workers.values()]

    @property
    def stages(self) -> set[str]:
        """Stages with a worker that requests can be sent to."""
        return {self._stages[load.worker] for load in self.loads}

    @property
    def planning(self) -> bool:
        """Whether this gateway is the one that plans the roles."""
        return self._planning

    def stage(self, worker: str) -> str:
        """The stage a worker belongs to; "" for one that has never reported."""
        return self._stages.get(worker, "")

    def report(self, process: str, load: WorkerLoad, now: float, *, planning: bool = True, gateways: int = 1) -> None:
        """``process`` reports for ``load.worker``. ``planning``: this gateway plans, one of ``gateways``."""
        self._stages[load.worker] = load.stage
        self._processes[load.worker] = process
        self._gateways = max(1, gateways)
        self._planning = planning
        if not planning:
            self.plan, self.roles = None, {}
        role = self.roles.get(load.worker, load.role)
        self._router.report(load if role == load.role else replace(load, role=role))
        if now - self._planned_at >= PLAN_S:
            self._planned_at = now
            self._review(now)

    def lost(self, process: str) -> None:
        """A worker's connection has ended: nothing goes there until it, or its successor, reports again."""
        for worker in [w for w, p in self._processes.items() if p == process]:
            self.forget(worker)

    def leave(self, process: str, load: WorkerLoad) -> None:
        """``load.worker`` ends what it has. It is known until its connection ends."""
        self._stages[load.worker] = load.stage
        self._processes[load.worker] = process
        self.leaving.add(load.worker)
        self._router.remove(load.worker)

    def forget(self, worker: str) -> None:
        self._router.remove(worker)
        self._processes.pop(worker, None)
        self.leaving.discard(worker)

    def arrived(self, request: RouteRequest, now: float) -> float:
        """Counts a request as demand, one that is refused as well. Batch requests are none: they take what is there.

        Returns the seconds that its prompt takes an idle worker.
        """
        cached = self._router.expected_cached(request)
        seconds = self._router.costs.prefill_seconds(request.prompt_tokens - cached, cached)
        if request.priority == "batch":
            return seconds
        output = request.expected_output_tokens * request.streams
        self.demand.arrived(now, seconds, output, request.prompt_tokens)
        return seconds

    def needed(self, now: float) -> dict[str, float]:
        """Replicas of each stage that this gateway's requests need, as fractions."""
        needs = {"prefill": 0.0, "decode": 0.0}
        # What waits in workers is told by those who have sent it.
        if self.demand.began:
            waiting = self._queue.waiting_tokens("realtime")
            needs = self._planner.needs(self.loads, self.demand.demand(now), waiting)
        needs = needs if self._prefill_stage else {"decode": sum(needs.values())}
        return needs | {"decode": needs["decode"] + self.batch_needed}

    def _review(self, now: float) -> None:
        for load in self.loads:
            if now - load.reported_at > SILENT_S:
                self.forget(load.worker)
        loads = self.loads
        if len(self._stages) > _GONE + len(loads):
            self._stages = {load.worker: self._stages[load.worker] for load in loads}
        if len(loads) > 1 and self._planning:
            # Requests are spread evenly over the gateways: what comes here stands for what comes to the others.
            waiting = self._queue.waiting_tokens("realtime") * self._gateways
            demand = self.demand.demand(now) * self._gateways
            self.plan = self._planner.plan(loads, demand, now, waiting_tokens=waiting)
            self.roles = dict(self.plan.roles)
