"""One model's requests in one gateway: who goes next, where to, and who is refused at once.

The policy is :mod:`serve_app.routing`, which knows no clock and no network; here are its clock and those who wait. A
request waits here and not in an engine: where order can still be chosen, and where the loss of a worker does not
reach it. A choice is a wish that Serve's router follows if it can; an answer never depends on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.api.errors import OutOfCapacity
from serve_app.channel.load import LoadReport
from serve_app.gateway.models import ServedModel
from serve_app.gateway.paths import Path
from serve_app.routing.admission import Admission, AdmissionConfig, Targets
from serve_app.routing.costs import CostModel
from serve_app.routing.fairness import FairQueue
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.planner import DemandMeter, Plan, Planner, PlannerConfig, StageLimits
from serve_app.routing.router import Router, RouterConfig
from serve_app.routing.types import Decision, FetchSample, Refusal, Role, RouteRequest, StepSample, WorkerLoad

# While requests wait, somebody may fit in with every step of a worker, reported or not.
PUMP_S = 0.02
PLAN_S = 1.0
# A worker that has not been heard of for three heartbeats gets nothing new until it is.
SILENT_S = 6.0
# Chunk keys that this gateway remembers per model, about 25 bytes each.
LOCALITY_KEYS = 200_000
# Retry-After where nothing is known of how long a model takes to load.
COLD_START_S = 10.0


@dataclass(slots=True)
class Ticket:
    """A request's way through the dispatcher. ``decision`` None: Serve chooses, since no worker has reported yet."""

    request: RouteRequest
    weight: float
    path: Path
    decision: Decision | None = None
    placed: bool = False
    blind: bool = False
    started: bool = False
    turn: asyncio.Future[None] | None = None


@dataclass(slots=True)
class Counters:
    """Since the start of this gateway."""

    placed: int = 0
    blind: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    why: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Dispatcher:
    """``report`` what workers say, ``enter`` with a request, ``finish`` when it has ended in whatever way."""

    def __init__(self, model: ServedModel, clock: Callable[[], float] = time.monotonic) -> None:
        profile = model.profile
        targets = profile.targets
        self._model = model
        self._clock = clock
        self.costs = CostModel()
        # Short prompts have few chunks: small models serve them, and their index can afford to look closer.
        window = model.context_window or 8192
        self.router_config = RouterConfig(chunk_tokens=64 if window <= 8192 else 256)
        self.router = Router(self.costs, LocalityIndex(LOCALITY_KEYS), self.router_config)
        self.queue = FairQueue(cached=self._cached)
        self.admission = Admission(
            self.router, self.queue, AdmissionConfig(targets=Targets(ttft=targets.ttft_s, itl=targets.itl_s))
        )
        limits = {
            name: StageLimits(stage.min_replicas, stage.max_replicas)
            for name, stage in profile.stages.items()
            if name in ("prefill", "decode")
        }
        wanted = {"ttft_target": targets.ttft_s, "itl_target": targets.itl_s}
        self.planner = Planner(
            self.costs, PlannerConfig(limits=limits, **{k: v for k, v in wanted.items() if v is not None})
        )
        self.demand = DemandMeter()
        self.plan: Plan | None = None
        self.counters = Counters()
        self.mean_output = 256.0
        self._stages: dict[str, str] = {}  # worker (replica id) -> the deployment it belongs to
        self._processes: dict[str, str] = {}  # worker -> the process that reports for it now
        self._roles: dict[str, Role] = {}
        self._waiting: dict[str, Ticket] = {}
        self._blind = 0
        self._timer: asyncio.TimerHandle | None = None
        self._planned_at = clock()

    # -- what workers say ----------------------------------------------------------------------------------------

    def report(self, process: str, report: LoadReport) -> None:
        now = self._clock()
        worker = report.replica
        self._stages[worker] = report.stage
        self._processes[worker] = process
        self.router.report(_load(report, self._roles.get(worker), now))
        if now - self._planned_at >= PLAN_S:
            self._plan(now)
        if self._waiting:
            self._pump()

    def lost(self, process: str) -> None:
        """A worker's connection has ended: nothing goes there until it, or its successor, reports again."""
        for worker in [w for w, p in self._processes.items() if p == process]:
            self._forget(worker)

    def _forget(self, worker: str) -> None:
        self.router.remove(worker)
        self._processes.pop(worker, None)

    def now(self) -> float:
        """On the clock of deadlines."""
        return self._clock()

    @property
    def workers(self) -> list[WorkerLoad]:
        """Those that requests can be sent to."""
        return [worker.load for worker in self.router.fleet.workers.values()]

    def _cached(self, request: RouteRequest) -> int:
        """Prompt tokens that are somewhere in the cluster, as far as this gateway knows."""
        chunks = max(self.router.locality.match(request.keys).values(), default=0)
        return min(chunks * self.router_config.chunk_tokens, request.prompt_tokens - 1)

    def _plan(self, now: float) -> None:
        self._planned_at = now
        for load in self.workers:
            if now - load.reported_at > SILENT_S:
                self._forget(load.worker)
        if len(self.workers) > 1:
            self.plan = self.planner.plan(self.workers, self.demand.demand(now), now)
            self._roles = dict(self.plan.roles)

    # -- what requests go through --------------------------------------------------------------------------------

    async def enter(self, ticket: Ticket) -> None:
        """Waits until it is the request's turn. Raises :class:`OutOfCapacity`, mostly at once.

        However this ends, :meth:`finish` is due.
        """
        now = self._clock()
        request = ticket.request
        request.expected_output_tokens = min(request.max_tokens, max(1, round(self.mean_output)))
        refusal = self.admission.consider(request, now)
        if not self.workers and request.reject_if_busy and self._model.scales_to_zero:
            refusal = Refusal(self._model.cold_start_s or COLD_START_S, "no worker is up, and it is not to wait")
        if refusal is not None:
            raise self._refused(refusal)
        ticket.turn = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = ticket
        self.queue.push(request, ticket.weight)
        ticket.path.event("queued", ahead_tokens=self.queue.ahead(request))
        self._pump()
        await ticket.turn

    def hints(self, ticket: Ticket) -> tuple[str, dict[str, Any]]:
        """The stage to call, and the fields of the wire request that carry the choice."""
        decision = ticket.decision
        if decision is None:
            return "", {}
        prefill = None
        if decision.prefill is not None:
            prefill = {"stage": self._stages.get(decision.prefill, "prefill"), "replica": decision.prefill}
        return self._stages.get(decision.decode, ""), {"replica": decision.decode, "prefill": prefill}

    def move(self, ticket: Ticket) -> None:
        """The request's worker is gone: chooses another. It has had its turn and does not wait again."""
        now = self._clock()
        if ticket.decision is not None:
            self._forget(ticket.decision.decode)
        self.admission.finished(ticket.request.id)
        ticket.decision = self.router.choose(ticket.request, now)
        if ticket.decision is not None:
            self.router.commit(ticket.request, ticket.decision, now)
        self._tell(ticket)

    def start(self, ticket: Ticket) -> None:
        """The first token is there."""
        if not ticket.started:
            ticket.started = True
            self.admission.started(ticket.request.id)

    def finish(self, ticket: Ticket, *, cached: int = 0, output: int = 0) -> None:
        """The request has ended, or has left before it began; ``cached`` prompt tokens and ``output`` tokens."""
        request = ticket.request
        self._waiting.pop(request.id, None)
        self.queue.remove(request.id)
        self.admission.finished(request.id)
        if ticket.blind:
            self._blind -= 1
        if ticket.placed:
            uncached = max(0, request.prompt_tokens - cached) if ticket.started else 0
            self.queue.settle(request.id, uncached, cached, output)
            if ticket.started:
                self.counters.prompt_tokens += request.prompt_tokens
                self.counters.cached_tokens += cached
                self.counters.output_tokens += output
                self.mean_output += 0.05 * (output - self.mean_output)
        if self._waiting:
            self._pump()

    def _pump(self) -> None:
        """Gives turns to those who may go now, in the queue's order."""
        now = self._clock()
        while (request := self.queue.pop(now)) is not None:
            ticket = self._waiting[request.id]
            outcome = self._place(ticket, now)
            if outcome is None:
                self.queue.push(request, ticket.weight, front=True)
                break
            del self._waiting[request.id]
            assert ticket.turn is not None
            if ticket.turn.done():
                continue  # it has just left; finish() is under way
            if isinstance(outcome, Refusal):
                ticket.turn.set_exception(self._refused(outcome))
            else:
                ticket.turn.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self._again)

    def _again(self) -> None:
        self._timer = None
        if self._waiting:
            self._pump()

    def _place(self, ticket: Ticket, now: float) -> Refusal | Ticket | None:
        if not self.workers:
            # Nobody has reported: let Serve choose, or start a first replica, as far as it has places.
            if self._blind >= self._model.slots:
                return None
            self._blind += 1
            self.counters.blind += 1
            ticket.blind = ticket.placed = True
            ticket.path.event("routed", why="no worker has reported yet")
            return ticket
        outcome = self.admission.place(ticket.request, now)
        if outcome is None or isinstance(outcome, Refusal):
            return outcome
        ticket.decision = outcome
        ticket.placed = True
        self.counters.placed += 1
        request = ticket.request
        seconds = float(self.costs.prefill_seconds(outcome.uncached, request.prompt_tokens - outcome.uncached))
        self.demand.arrived(now, seconds, request.expected_output_tokens, request.prompt_tokens)
        self._tell(ticket)
        return ticket

    def _tell(self, ticket: Ticket) -> None:
        decision = ticket.decision
        if decision is None:
            ticket.path.event("routed", why="no worker has reported yet")
            return
        self.counters.why[decision.why] = self.counters.why.get(decision.why, 0) + 1
        ticket.path.event(
            "routed",
            why=decision.why,
            decode=decision.decode,
            prefill=decision.prefill,
            expected_ttft_ms=round(decision.ttft * 1e3, 1),
            expected_uncached_tokens=decision.uncached,
        )

    def _refused(self, refusal: Refusal) -> OutOfCapacity:
        self.counters.refused[refusal.reason] = self.counters.refused.get(refusal.reason, 0) + 1
        return OutOfCapacity(
            f"Capacity temporarily exceeded, please try again: {refusal.reason}.", retry_after=refusal.retry_after
        )

    # -- for people who look -------------------------------------------------------------------------------------

    def stats(self, account: str | None = None) -> dict[str, Any]:
        """Queues, choices and roles as this gateway sees them; with ``account``, only what concerns it."""
        waiting = self.queue.lengths()
        if account is not None:
            return {"waiting": {account: waiting.get(account, 0)}}
        now = self._clock()
        return {
            "waiting": waiting,
            "waiting_tokens": self.queue.waiting_tokens(),
            "prefill_tokens_in_flight": self.admission.in_flight.prefill,
            "decode_tokens_in_flight": self.admission.in_flight.decode,
            "placed": self.counters.placed,
            "placed_by_serve": self.counters.blind,
            "why": dict(self.counters.why),
            "refused": dict(self.counters.refused),
            "prompt_tokens": self.counters.prompt_tokens,
            "cached_tokens": self.counters.cached_tokens,
            "output_tokens": self.counters.output_tokens,
            "workers": [
                {
                    "replica": load.worker,
                    "stage": self._stages.get(load.worker, ""),
                    "role": load.role,
                    "queued_tokens": load.queued_prefill_tokens,
                    "running": load.running,
                    "waiting": load.waiting,
                    "kv_use": round(load.kv_blocks_used / max(1, load.kv_blocks_total), 3),
                    "step_ms": round(load.step_seconds * 1e3, 2),
                    "age_s": round(now - load.reported_at, 2),
                }
                for load in self.workers
            ],
            "plan": None if self.plan is None else {"replicas": self.plan.replicas, "why": self.plan.why},
        }


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
