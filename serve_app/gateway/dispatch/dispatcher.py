"""One model's requests in one gateway: who goes next, where to, and who is refused at once.

The policy is :mod:`serve_app.routing`, which knows no clock and no network; here are its clock and those who wait. A
request waits here and not in an engine: where order can still be chosen, and where the loss of a worker does not
reach it. A choice is a wish that Serve's router follows if it can; an answer never depends on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.api.errors import OutOfCapacity
from serve_app.channel.load import LoadReport
from serve_app.gateway.dispatch.cold_start import ColdStart
from serve_app.gateway.dispatch.served import ServedElsewhere
from serve_app.gateway.dispatch.workers import Workers
from serve_app.gateway.models import ServedModel
from serve_app.routing.admission import Admission, AdmissionConfig, Targets
from serve_app.routing.costs import CostModel, CostPriors
from serve_app.routing.fairness import FairQueue
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.router import Router, RouterConfig
from serve_app.routing.types import Decision, Refusal, RouteRequest
from serve_app.state.traces import Path

# While requests wait, somebody may fit in with every step of a worker, reported or not.
PUMP_S = 0.02
PLAN_S = 1.0
# A worker that has not been heard of for three heartbeats gets nothing new until it is.
SILENT_S = 6.0
STRICT_ROLE_COST_S = 1.0
# Tenants that are looked at when there is no place for the one that is next.
HEADS = 8
# First guesses for small models on a core, seconds; measured steps correct them.
CPU_PRIORS = CostPriors(
    prefill_step=1.5e-3,
    prefill_token=1e-4,
    prefill_attention=1e-8,
    decode_step=2e-3,
    decode_seq=3e-4,
    decode_kv_token=5e-7,
    fetch_latency={"worker": 0.0, "node": 5e-3, "remote": 15e-3, "disk": 10e-3},
    fetch_token={"worker": 0.0, "node": 3e-6, "remote": 1e-5, "disk": 1e-5},
)
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
    placed_at: float = 0.0
    blind: bool = False
    started: bool = False
    calls: int = 0  # under way to workers
    turn: asyncio.Future[None] | None = None


@dataclass(slots=True)
class Counters:
    """Since the start of this gateway."""

    placed: int = 0
    blind: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    why: dict[str, int] = field(default_factory=dict)
    # Prompt tokens by where their K/V came from: computed, the worker's own blocks, a tier of the pool.
    sources: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0


class Dispatcher:
    """``report`` what workers say, ``enter`` with a request, ``finish`` when it has ended in whatever way."""

    def __init__(
        self,
        model: ServedModel,
        clock: Callable[[], float] = time.monotonic,
        name: Callable[[], str] = lambda: "",
    ) -> None:
        """``name``: what load reports call this gateway."""
        profile = model.profile
        targets = profile.targets
        self._model = model
        self._clock = clock
        on_gpu = any(stage.num_gpus for stage in profile.stages.values())
        self.costs = CostModel(None if on_gpu else CPU_PRIORS)
        # Short prompts have few chunks: small models serve them, and their index can afford to look closer.
        chunk_tokens = 64 if (model.context_window or 8192) <= 8192 else 256
        # A record that wants even the shortest prompt prefilled elsewhere holds more of the roles than of a second.
        self.router_config = RouterConfig(chunk_tokens=chunk_tokens, early_handover=True)
        if profile.min_remote_prefill_tokens == 0:
            self.router_config = replace(self.router_config, role_cost=STRICT_ROLE_COST_S)
        self.router = Router(self.costs, LocalityIndex(LOCALITY_KEYS), self.router_config)
        self.queue = FairQueue(cached=self.router.expected_cached)
        self.admission = Admission(
            self.router, self.queue, AdmissionConfig(targets=Targets(ttft=targets.ttft_s, itl=targets.itl_s))
        )
        self.elsewhere = ServedElsewhere(name, self.queue.charge)
        self.workers = Workers(profile, self.router, self.queue, clock, name)
        self.cold_start = ColdStart(model.scales_to_zero)
        self.counters = Counters()
        self.mean_output = 256.0
        self._waiting: dict[str, Ticket] = {}
        self._blind = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- what workers say ----------------------------------------------------------------------------------------

    def report(self, process: str, report: LoadReport) -> None:
        """A worker, known by its process, tells of its load."""
        self.cold_start.over(self._clock())
        self.workers.report(process, report)
        self.elsewhere.take(process, report)
        if self._waiting:
            self._pump()

    def lost(self, process: str) -> None:
        """A worker's connection has ended."""
        self.workers.lost(process)
        self.elsewhere.lost(process)

    def now(self) -> float:
        """On the clock of deadlines."""
        return self._clock()

    # -- what requests go through --------------------------------------------------------------------------------

    async def enter(self, ticket: Ticket) -> None:
        """Waits until it is the request's turn. Raises :class:`OutOfCapacity`, mostly at once.

        However this ends, :meth:`finish` is due.
        """
        now = self._clock()
        request = ticket.request
        request.expected_output_tokens = min(request.max_tokens, max(1, round(self.mean_output)))
        # What is refused is demand as well.
        cached = self.router.expected_cached(request)
        seconds = float(self.costs.prefill_seconds(request.prompt_tokens - cached, cached))
        self.workers.demand.arrived(now, seconds, request.expected_output_tokens, request.prompt_tokens)
        refusal = (self.admission if self.workers.loads else self.cold_start).consider(request, now)
        if refusal is not None:
            raise self._refused(refusal)
        ticket.turn = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = ticket
        self.queue.push(request, ticket.weight)
        ticket.path.event("queued", ahead_tokens=self.queue.ahead(request))
        self._pump()
        await ticket.turn

    def waiting(self) -> str:
        """What a request has to wait for before anything can be done about it, in words; "" for nothing."""
        if self.workers.loads or not self._model.scales_to_zero:
            return ""
        return f"{self._model.id} is starting, about {self.cold_start.left(self._clock()):.0f} s left"

    def hints(self, ticket: Ticket) -> tuple[str, dict[str, Any]]:
        """The stage to call, and the fields of the wire request that carry the choice."""
        decision = ticket.decision
        if decision is None:
            # A model that starts for this request: its first worker shall not wait for a second one to prefill.
            return "", {"prefill": None} if self._model.scales_to_zero else {}
        prefill = None
        if decision.prefill is not None:
            prefill = {"stage": self.workers.stage(decision.prefill) or "prefill", "replica": decision.prefill}
        return self.workers.stage(decision.decode), {"replica": decision.decode, "prefill": prefill}

    def move(self, ticket: Ticket) -> None:
        """The request's worker is gone: chooses another. It has had its turn and does not wait again."""
        now = self._clock()
        if ticket.decision is not None:
            self.workers.forget(ticket.decision.decode)
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
            if ticket.decision is not None:
                self.admission.arrived(ticket.decision.ttft, self._clock() - ticket.placed_at)

    def left(self, ticket: Ticket) -> None:
        """The worker has done with the request, though its client may still read."""
        self.router.left(ticket.request.id)

    def finish(self, ticket: Ticket, *, cached: int = 0, output: int = 0) -> None:
        """The request has ended, or has left before it began; ``cached`` prompt tokens and ``output`` tokens."""
        request = ticket.request
        self._waiting.pop(request.id, None)
        self.queue.remove(request.id)
        self.admission.finished(request.id, self._clock() if ticket.started else None)
        if ticket.blind:
            self._blind -= 1
        if ticket.placed:
            uncached = max(0, request.prompt_tokens - cached) if ticket.started else 0
            self.queue.settle(request.id, uncached, cached, output)
            if ticket.started:
                self.counters.output_tokens += output
                self.mean_output += 0.05 * (output - self.mean_output)
        if self._waiting:
            self._pump()

    def count_prompt(self, sources: dict[str, int]) -> None:
        """Where a prompt's K/V came from, in tokens by source."""
        for source, tokens in sources.items():
            if tokens > 0:
                self.counters.sources[source] = self.counters.sources.get(source, 0) + tokens

    def _pump(self) -> None:
        """Gives turns to those who may go now, in the queue's order."""
        now = self._clock()
        while any(self._turn(r, now) for r in self._candidates()):
            pass
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self._again)

    def _candidates(self) -> Iterator[RouteRequest]:
        """Who is next; and, should there be no place for it, whoever has fewer streams than others."""
        for number, request in enumerate(self.queue.heads(HEADS)):
            if number == 0 or self.admission.below_share(request.tenant):
                yield request

    def _turn(self, request: RouteRequest, now: float) -> bool:
        """Gives a waiting request its turn, or its refusal; False if there is no place for it yet."""
        ticket = self._waiting[request.id]
        assert ticket.turn is not None
        outcome = self._place(ticket, now)
        if outcome is None:
            return False
        del self._waiting[request.id]
        if isinstance(outcome, Refusal):
            self.queue.remove(request.id)
        else:
            self.queue.take(request.id)
        # Whose turn is done has just left, and finish() is under way.
        if not ticket.turn.done() and isinstance(outcome, Refusal):
            ticket.turn.set_exception(self._refused(outcome))
        elif not ticket.turn.done():
            ticket.turn.set_result(None)
        return True

    def _again(self) -> None:
        self._timer = None
        if self._waiting:
            self._pump()

    def _place(self, ticket: Ticket, now: float) -> Refusal | Ticket | None:
        if not self.workers.loads:
            # Nobody has reported: let Serve choose, or start a first replica, as far as it has places.
            if self._blind >= self._model.slots:
                return None
            self._blind += 1
            self.counters.blind += 1
            self.cold_start.begun(now)
            ticket.blind = ticket.placed = True
            ticket.path.event("routed", why="no worker has reported yet")
            return ticket
        outcome = self.admission.place(ticket.request, now)
        if outcome is None or isinstance(outcome, Refusal):
            return outcome
        ticket.decision = outcome
        ticket.placed = True
        ticket.placed_at = now
        self.counters.placed += 1
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
        return {
            "waiting": waiting,
            "waiting_tokens": self.queue.waiting_tokens(),
            "prefill_tokens_in_flight": self.admission.in_flight.prefill,
            "decode_tokens_in_flight": self.admission.in_flight.decode,
            "placed": self.counters.placed,
            "placed_by_serve": self.counters.blind,
            "why": dict(self.counters.why),
            "refused": dict(self.counters.refused),
            "prompt_tokens_by_source": dict(self.counters.sources),
            "output_tokens": self.counters.output_tokens,
            "workers": self.workers.stats(),
            "plan": self.workers.planned(),
        }
