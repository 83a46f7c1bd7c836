"""One model's requests in one gateway as a state machine: which goes next, where to, and which is refused.

Time is an argument of every call, and what has been decided is returned. The gateway drives it with a clock, futures
and timers (:mod:`serve_app.gateway.dispatch`), the trace simulator with simulated time.

::

    arrive ──> refused: predicted to be late
       │
    waiting ──> refused: too late at its turn
       │   └──> finish: its client has left
     turn ──> started ──> finish
       └─ move: its worker is lost ─┘

A request waits here and not in an engine: here the order can still be chosen, and the loss of a worker does not reach
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from serve_app.routing.absence import Absence
from serve_app.routing.admission import Admission, AdmissionConfig
from serve_app.routing.costs import CostModel, CostPriors
from serve_app.routing.fairness import FairConfig, FairQueue
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.places import Lengths
from serve_app.routing.planner import Planner, PlannerConfig
from serve_app.routing.prices import RouterConfig
from serve_app.routing.router import Router
from serve_app.routing.served import ServedCount, ServedElsewhere
from serve_app.routing.types import Decision, Prediction, Priority, Refusal, RouteRequest, WorkerLoad
from serve_app.routing.workers import Workers

# While requests wait, one may fit in after any step of a worker, whether a report has shown it or not.
TICK_S = 0.02
# Requests that are tried when there is no place for the next one.
HEADS = 8
# A request of several streams needs several places at once. They are never free together while others take each one as
# it comes, so after this long at the head of the queue it lets no other request pass.
PASS_S = 1.0
# How often those that can't wait for ever are looked at where their turn does not come.
SWEEP_S = 0.25
# How far one answer moves the mean length of answers.
OUTPUT_GAIN = 0.05


@dataclass(slots=True, frozen=True)
class DispatchConfig:
    """Of one model. ``slots``: streams that may run while no worker reports, where none can."""

    admission: AdmissionConfig = AdmissionConfig()
    slots: int = 1
    scales_to_zero: bool = False
    prefill_stage: bool = True
    priors: CostPriors | None = None
    router: RouterConfig = RouterConfig()
    fair: FairConfig = field(default_factory=FairConfig)
    # Chunk keys remembered at first, about 25 bytes each; soon as many as caches and pools may hold.
    locality_keys: int = 16_384


@dataclass(slots=True, frozen=True)
class Turn:
    """The decision on a request that waited. With neither field set no worker reports, and the caller's own load
    balancing chooses.
    """

    request_id: str
    decision: Decision | None = None
    refusal: Refusal | None = None


@dataclass(slots=True)
class Effects:
    """What a call has brought about. ``tick_at``: when :meth:`Dispatch.tick` is due; None while no request waits.

    ``ahead``: for a request that has arrived and may wait, the prompt tokens that go before it.
    """

    turns: list[Turn] = field(default_factory=list)
    tick_at: float | None = None
    ahead: int | None = None


@dataclass(slots=True)
class CachedTokens:
    """Of requests that have had a first token, since the start: prompt tokens that a cache was expected to hold when
    they arrived, those of them that it did not (``missing``), and those that came from one unexpectedly.
    """

    expected: int = 0
    missing: int = 0
    unexpected: int = 0

    def add(self, expected: int, found: int) -> None:
        self.expected += expected
        self.missing += max(expected - found, 0)
        self.unexpected += max(found - expected, 0)


@dataclass(slots=True)
class Counters:
    """Since the start."""

    placed: int = 0
    unrouted: int = 0  # placed by the caller's own load balancing
    refused: dict[str, int] = field(default_factory=dict)
    why: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    cached_tokens: CachedTokens = field(default_factory=CachedTokens)


@dataclass(slots=True)
class _Live:
    request: RouteRequest
    decision: Decision | None = None
    placed: bool = False
    unrouted: bool = False
    started: bool = False
    unseen: bool = False  # it came while there was no worker, whose queue it might have found too long
    blocked_at: float | None = None  # when it was first at the head of the queue without a place


class Dispatch:
    """``arrive`` with a request, ``report`` what workers say, ``finish`` when a request has ended in whatever way.

    Each of these, and ``tick``, may give waiting requests their turns. Times are seconds on one clock.
    """

    def __init__(self, config: DispatchConfig | None = None) -> None:
        self.config = config or DispatchConfig()
        targets = self.config.admission.targets
        wanted = {"ttft_target": targets.ttft, "itl_target": targets.itl}
        self.costs = CostModel(self.config.priors)
        router = replace(self.config.router, ttft=targets.ttft, itl=targets.itl)
        self.router = Router(self.costs, LocalityIndex(self.config.locality_keys), router)
        self.queue = FairQueue(self.config.fair, self.router.expected_cached)
        self.admission = Admission(self.router, self.queue, self.config.admission)
        self.elsewhere = ServedElsewhere(self.queue.charge)
        planner = Planner(self.costs, PlannerConfig(**{k: v for k, v in wanted.items() if v is not None}))
        self.workers = Workers(self.router, self.queue, planner, prefill_stage=self.config.prefill_stage)
        self.absence = Absence(self.config.scales_to_zero, self.config.slots)
        self.counters = Counters()
        # Tokens of one stream; what batch requests ask for says nothing about the others.
        self.mean_output: dict[Priority, float] = {"realtime": 256.0, "batch": 256.0}
        self.lengths: dict[Priority, Lengths] = {"realtime": Lengths(), "batch": Lengths()}
        self._live: dict[str, _Live] = {}
        # Those of the waiting that have a deadline, said not to wait, or may be held back since they are long.
        self._hasty: dict[str, _Live] = {}
        self._swept = 0.0
        self._unrouted = 0

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    # -- workers -------------------------------------------------------------------------------------------------

    def report(
        self,
        process: str,
        load: WorkerLoad,
        now: float,
        *,
        planning: bool = True,
        gateways: int = 1,
        served: Sequence[ServedCount] = (),
    ) -> Effects:
        """A worker, known by its process, reports its load, and what other gateways have had ``served`` there.

        ``planning``: this gateway plans the roles, one of ``gateways`` that the worker reports to.
        """
        if load.leaving:
            return self._leaves(process, load, now, served)
        self.absence.over(now)
        load.standing = tuple(replace(one, tenant=self.elsewhere.name(one.tenant)) for one in load.standing)
        self.workers.report(process, load, now, planning=planning, gateways=gateways)
        self.admission.gateways = max(1, gateways)
        self.elsewhere.take(process, served)
        return self.tick(now)

    def lost(self, process: str, now: float) -> None:
        """A worker's connection has ended."""
        before = len(self.router.fleet)
        self.workers.lost(process)
        self.elsewhere.lost(process)
        if before and not len(self.router.fleet):
            self.absence.lost(now)

    def _leaves(self, process: str, load: WorkerLoad, now: float, served: Sequence[ServedCount]) -> Effects:
        """A worker ends what it has: nothing new goes there."""
        before = len(self.router.fleet)
        self.workers.leave(process, load)
        self.elsewhere.take(process, served)
        if before and not len(self.router.fleet):
            self.absence.lost(now)
        return self.tick(now)

    # -- requests ------------------------------------------------------------------------------------------------

    def arrive(self, request: RouteRequest, now: float) -> Effects:
        """A new request. Its id must not be live."""
        self._expect(request)
        self.admission.lanes.measure(request, self.workers.arrived(request, now), now)
        present = bool(len(self.router.fleet))
        refusal = (self.admission if present else self.absence).consider(request, now)
        if refusal is not None:
            return Effects([self._refused(request.id, refusal)], self._tick_at(now))
        ahead = self.queue.ahead(request)
        live = self._live[request.id] = _Live(request, unseen=not present)
        if request.deadline is not None or request.reject_if_busy or request.long:
            self._hasty[request.id] = live
        self.queue.push(request)
        effects = self.tick(now)
        effects.ahead = ahead
        return effects

    def predict(self, request: RouteRequest, now: float) -> Prediction | None:
        """What would become of ``request`` if it arrived now: :meth:`arrive` without an arrival. None while no worker
        has reported.
        """
        self._expect(request)
        return self.admission.predict(request, now)

    def tick(self, now: float) -> Effects:
        """Gives turns to the requests that may go now, in the queue's order."""
        turns = self._sweep(now)
        while (turn := self._next_turn(now)) is not None:
            turns.append(turn)
        return Effects(turns, self._tick_at(now))

    def move(self, request_id: str, now: float) -> Decision | None:
        """The request's worker is gone: chooses another. It has had its turn and does not wait again.

        None: no worker is up, and the caller waits for one or leaves the choice to its own load balancing; or the
        request has finished meanwhile.
        """
        live = self._live.get(request_id)
        if live is None:
            return None
        if live.decision is not None:
            before = len(self.router.fleet)
            self.workers.forget(live.decision.decode)
            if before and not len(self.router.fleet):
                self.absence.lost(now)
        # What the lost worker held is lost with it.
        live.request.expected_cached_tokens = None
        live.decision = self.admission.move(live.request, now, started=live.started)
        if live.decision is not None:
            self._count(live.decision)
        return live.decision

    def adopt(self, request: RouteRequest, decision: Decision | None, *, started: bool) -> None:
        """A request that has had its turn from another dispatch: from now on it is one of this. ``started``: its first
        token is there.
        """
        if request.id not in self._live:
            self._live[request.id] = _Live(request, decision, placed=True, started=started)

    def can_wait(self, request_id: str, now: float) -> bool:
        """Whether a request without a worker should wait for a report. At a model that scales to zero, one that Serve
        does not see would keep no replica.
        """
        return request_id in self._live and not self.config.scales_to_zero and self.absence.waits(now)

    def started(self, request_id: str, now: float) -> None:
        """The first token is there; more than once is harmless."""
        live = self._live.get(request_id)
        if live is not None and not live.started:
            live.started = True
            self.admission.started(request_id, now)

    def stream_ended(self, request_id: str) -> None:
        """The worker has done with one of the request's streams, though its client may still read."""
        self.router.stream_ended(request_id)

    def finish(self, request_id: str, now: float, *, cached: int = 0, output: int = 0) -> Effects:
        """The request has ended, or its client has left before its turn; ``cached`` prompt tokens, ``output`` tokens.

        A request that was refused, or has finished, is not known any more: nothing happens.
        """
        live = self._live.pop(request_id, None)
        if live is None:
            return Effects([], self._tick_at(now))
        self._hasty.pop(request_id, None)
        request = live.request
        self.queue.remove(request_id)
        self.admission.finished(request_id, now if live.started else None)
        if live.unrouted:
            self._unrouted -= request.streams
        if live.placed:
            uncached = max(0, request.prompt_tokens - cached) if live.started else 0
            self.queue.settle(request_id, uncached, cached, output)
            if live.started:
                self.counters.output_tokens += output
                mine, each = request.priority, output / request.streams
                # One that may have no second token says nothing of how long answers are.
                if request.max_tokens > 1:
                    self.mean_output[mine] += OUTPUT_GAIN * (each - self.mean_output[mine])
                    self.lengths[mine].ended(request.tenant, request.max_tokens, each)
                if request.expected_cached_tokens is not None:
                    self.counters.cached_tokens.add(request.expected_cached_tokens, cached)
        return self.tick(now)

    # -- inside --------------------------------------------------------------------------------------------------

    def _expect(self, request: RouteRequest) -> None:
        """How long the request's answer will probably be, by the answers before it."""
        request.expected_output_tokens = min(request.max_tokens, max(1, round(self.mean_output[request.priority])))
        request.stay_tokens = self.lengths[request.priority].expected(request.tenant, request.max_tokens)

    def _next_turn(self, now: float) -> Turn | None:
        self.queue.long_open = self.admission.lanes_open(now)
        # All but the one whose turn it is.
        self.router.fleet.waiting = max(self.queue.waiting("realtime") - 1, 0)
        # Requests of one priority find other places than those of the other, and hold none of them up.
        for priority in self.queue.priorities():
            heads, held_up = self.queue.heads(HEADS, priority), False
            for request in heads:
                # Where the head finds no place, tenants with fewer streams than others may pass it, and once nobody may
                # any more, those that others have to give places to.
                if request is not heads[0] and not self.admission.may_pass(request, held_up):
                    continue
                turn = self._try(self._live[request.id], now)
                if turn is not None:
                    return turn
                held_up |= request is heads[0] and self._holds_up(self._live[request.id], now)
        return None

    def _holds_up(self, head: _Live, now: float) -> bool:
        """Whether no request may pass the head of the queue any more."""
        if head.blocked_at is None:
            head.blocked_at = now
        return head.request.streams > 1 and now - head.blocked_at >= PASS_S

    def _try(self, live: _Live, now: float) -> Turn | None:
        """The request's turn or its refusal; None if there is no place for it yet."""
        request = live.request
        if not len(self.router.fleet):
            return self._unrouted_turn(live, now)
        outcome: Decision | Refusal | None = None
        if live.unseen and request.reject_if_busy:
            outcome = self.admission.consider(request, now)
        live.unseen = False
        outcome = outcome or self.admission.place(request, now)
        if outcome is None:
            return None
        if isinstance(outcome, Refusal):
            return self._turned_away(request, outcome)
        self.queue.take(request.id)
        self._hasty.pop(request.id, None)
        live.decision, live.placed = outcome, True
        self.counters.placed += 1
        self._count(outcome)
        return Turn(request.id, outcome)

    def _unrouted_turn(self, live: _Live, now: float) -> Turn | None:
        """Without a worker: the request waits for one, or is sent where the caller's load balancing finds one."""
        streams = live.request.streams
        if not self.absence.sends(streams, self._unrouted, now):
            return None
        self._unrouted += streams
        self.counters.unrouted += 1
        self.absence.begun(now)
        self.queue.take(live.request.id)
        self._hasty.pop(live.request.id, None)
        live.unrouted = live.placed = True
        return Turn(live.request.id)

    def _sweep(self, now: float) -> list[Turn]:
        """Refuses those that can wait no longer, wherever they stand: all while there is no worker, and the long ones
        that have waited longest while these are held back.
        """
        present = bool(len(self.router.fleet))
        if not self._hasty or (present and self.queue.long_open) or now - self._swept < SWEEP_S:
            return []
        self._swept = now
        requests = [live.request for live in self._hasty.values() if live.request.long or not present]
        consider = self.admission.overdue if present else self.absence.consider
        refused = [(request, consider(request, now)) for request in (requests[:HEADS] if present else requests)]
        return [self._turned_away(request, refusal) for request, refusal in refused if refusal is not None]

    def _turned_away(self, request: RouteRequest, refusal: Refusal) -> Turn:
        self.queue.remove(request.id)
        del self._live[request.id]
        self._hasty.pop(request.id, None)
        return self._refused(request.id, refusal)

    def _tick_at(self, now: float) -> float | None:
        return now + TICK_S if len(self.queue) else None

    def _count(self, decision: Decision) -> None:
        self.counters.why[decision.why] = self.counters.why.get(decision.why, 0) + 1

    def _refused(self, request_id: str, refusal: Refusal) -> Turn:
        self.counters.refused[refusal.reason] = self.counters.refused.get(refusal.reason, 0) + 1
        return Turn(request_id, refusal=refusal)
