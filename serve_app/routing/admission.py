"""Places a request, lets it wait, or refuses it at once, by the predicted time to its first token.

A request is refused exactly when it is predicted to be late, and is told how long the wait would be. An admitted
request that would queue on a worker waits in the gateway instead, where the order can still be chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.routing.fairness import FairQueue
from serve_app.routing.fleet import Worker
from serve_app.routing.lanes import Lanes
from serve_app.routing.router import Router
from serve_app.routing.streams import Streams
from serve_app.routing.types import Decision, Prediction, Priority, Refusal, RouteRequest

# How far one late first token moves the margin, the most that one counts, and what a refusal leaves of the margin.
MARGIN_GAIN = 0.1
MARGIN_CAP_S = 1.0
MARGIN_DECAY = 0.9
# Batch requests that a worker is sent beyond its places: a part of these, and at least so many.
QUEUED_PART = 0.25
QUEUED_LEAST = 2
_CROWDED = "too many tokens wait for this model"


@dataclass(slots=True, frozen=True)
class Targets:
    """Latency targets of one model, seconds; None is no target."""

    ttft: float | None = None
    itl: float | None = None


@dataclass(slots=True, frozen=True)
class AdmissionConfig:
    targets: Targets = Targets()
    # A prompt that by itself takes longer than the target may take this many times as long as it takes alone.
    patience: float = 1.5
    # Prefill kept queued on workers: enough that they do not run dry between two reports.
    window_s: float = 0.15
    # A shorter wait does not count as busy for reject_if_busy.
    busy_s: float = 0.05
    # A bound on the gateway's memory, whatever the target.
    max_waiting_tokens: int = 50_000_000
    retry_cap_s: float = 600.0
    # A tenant below its share of the streams may exceed the target between tokens by this factor.
    stretch: float = 1.25
    # Share of the time in the queue that is kept for errors where a request has a deadline. Under overload the queue is
    # as long as deadlines allow, and without it each small error would waste the work done for a late request.
    slack: float = 0.25


class DrainMeter:
    """How fast waiting requests get their turns, for whatever reason they wait."""

    GAIN = 0.05
    # A measurement is too old after this long without a turn.
    FRESH_S = 30.0

    def __init__(self) -> None:
        self._seconds = 0.0  # from one turn to the next while others wait
        self._last: float | None = None
        self._others = False

    def turn(self, now: float, waiting: int) -> None:
        """A request has its turn, and ``waiting`` others have not. Turns given together are 0 seconds apart."""
        if self._others and self._last is not None and now - self._last < self.FRESH_S:
            interval = now - self._last
            self._seconds = interval if not self._seconds else self._seconds + self.GAIN * (interval - self._seconds)
        self._last, self._others = now, waiting > 0

    def seconds(self, requests: float, now: float) -> float:
        """Until ``requests`` that wait have had their turns; 0 while nothing is known."""
        if self._last is None or now - self._last > self.FRESH_S:
            return 0.0
        return requests * self._seconds


@dataclass(slots=True)
class InFlight:
    """Tokens of placed requests that are not done yet, by stage."""

    prefill: int = 0
    decode: int = 0


@dataclass(slots=True)
class _Admitted:
    tenant: str
    priority: Priority
    streams: int
    prefill: int
    decode: int
    due: float | None  # predicted time of the first token; None once it is there
    long: bool = False


class Admission:
    """One per model and gateway; shares its :class:`Router` and its :class:`FairQueue`.

    Call ``consider`` at arrival, ``place`` when it is a request's turn, ``started`` at its first token, ``finished`` at
    its end.
    """

    def __init__(self, router: Router, queue: FairQueue, config: AdmissionConfig | None = None) -> None:
        self.router = router
        self.queue = queue
        self.config = config or AdmissionConfig()
        self.in_flight = InFlight()
        self.lanes = Lanes(self.config.targets.ttft)
        self.gateways = 1  # that send requests to the same workers, each by an admission of its own
        self._admitted: dict[str, _Admitted] = {}
        self._streams: dict[Priority, Streams] = {"realtime": Streams(), "batch": Streams()}
        self._drain: dict[Priority, DrainMeter] = {"realtime": DrainMeter(), "batch": DrainMeter()}
        self._margin = 0.0  # seconds by which first tokens come later than predicted

    def predict(self, request: RouteRequest, now: float) -> Prediction | None:
        """What :meth:`consider` would go by if the request arrived now; None if no worker is up. Nothing changes."""
        decision = self.router.choose(request, now)
        if decision is None:
            return None
        queued = self.queued_seconds(request, now)
        return Prediction(_cached(request, decision), queued + decision.wait, queued + decision.ttft + self._margin)

    def consider(self, request: RouteRequest, now: float) -> Refusal | None:
        """At arrival: None if the request may wait its turn, or why it can't and when to try again."""
        if _patient(request):
            # Nothing that could be predicted of it would refuse it.
            crowded = self.queue.waiting_tokens() + request.prompt_tokens > self.config.max_waiting_tokens
            return self._refusal(self.queued_seconds(request, now), _CROWDED) if crowded else None
        decision = self.router.choose(request, now)
        if decision is None:
            return None  # no worker is up: see absence.py
        request.expected_cached_tokens = _cached(request, decision)
        queued = self.queued_seconds(request, now)
        wait = queued + decision.wait
        if self.queue.waiting_tokens() + request.prompt_tokens > self.config.max_waiting_tokens:
            return self._refusal(wait, _CROWDED)
        held_up = request.long and not self.lanes_open(now)
        if request.reject_if_busy and (held_up or wait > self.config.busy_s):
            # A long one waits for another long one, about as long as it takes itself.
            wait = max(wait, decision.ttft) if held_up else wait
            return self._refusal(wait, "busy, and the request said not to wait")
        # The time that others take is predicted less well than the request's own.
        slack = 1.0 if request.deadline is None else 1.0 - self.config.slack
        return self._late(request, now, queued / slack + decision.ttft, wait, self._given(request, decision))

    def place(self, request: RouteRequest, now: float) -> Decision | Refusal | None:
        """When it is the request's turn: where it goes, None while there is no place, or a refusal if it is late."""
        # A batch in the queue asks whenever anything changes, and a place is dear to price.
        if _patient(request):
            workers = self.router.view("batch").workers.values()
            if not any(_takes(request, worker) or worker.gives_s(request) < math.inf for worker in workers):
                return None
        decision = self.router.choose(request, now)
        if decision is None:
            return None
        if request.expected_cached_tokens is None:
            request.expected_cached_tokens = _cached(request, decision)
        wait = decision.wait
        late = self._late(request, now, decision.ttft, wait, self._given(request, decision))
        if late is not None:
            return late
        if self._full(request, decision, now) or self._crowded(request, decision, now):
            return None
        waiting = self.queue.waiting(request.priority) - (request.id in self.queue)
        self._drain[request.priority].turn(now, waiting)
        self._admit(request, decision, now)
        return decision

    def overdue(self, request: RouteRequest, now: float) -> Refusal | None:
        """Why a request that waits would be late even if it had its turn now."""
        decision = self.router.choose(request, now)
        given = self._given(request, decision) if decision is not None else 0.0
        return self._late(request, now, decision.ttft, decision.wait, given) if decision is not None else None

    def move(self, request: RouteRequest, now: float, *, started: bool) -> Decision | None:
        """Another place for a request whose worker is lost; None if no worker is up. ``started``: it has tokens."""
        self.finished(request.id)
        decision = self.router.choose(request, now)
        if decision is not None:
            self._admit(request, decision, now)
            if started:
                self._prefilled(self._admitted[request.id])
        return decision

    def started(self, request_id: str, now: float) -> None:
        """The first token is there. One that is later than predicted makes later predictions more careful."""
        self.router.started(request_id, now)
        admitted = self._admitted.get(request_id)
        if admitted is None or admitted.due is None:
            return
        error = min(max(now - admitted.due, 0.0), MARGIN_CAP_S)
        self._margin += MARGIN_GAIN * (error - self._margin)
        self._prefilled(admitted)

    def finished(self, request_id: str, now: float | None = None) -> None:
        """The request has ended in whatever way; ``now`` if its client has the answer and may ask anew."""
        self._forget(request_id, now)
        self.router.finished(request_id)

    def queued_seconds(self, request: RouteRequest, now: float = 0.0) -> float:
        """About how long the requests that go before this one keep the workers busy: the largest of what their prompts
        take, of what the latest turns took, and of what passes until as many places are free.
        """
        ahead = self.queue.ahead(request)
        if not ahead:
            return 0.0
        requests = ahead * len(self.queue) / max(self.queue.waiting_tokens(), 1)
        turns = self.router.view(request.priority).turn_s(round(requests), request.streams, request.stay_tokens, now)
        drained = self._drain[request.priority].seconds(requests, now)
        return max(ahead * self.router.seconds_per_token(now), drained, turns)

    def lanes_open(self, now: float) -> bool:
        """Whether a long prompt may go."""
        return self.lanes.open(self.router.fleet, now, self.gateways)

    def below_share(self, request: RouteRequest) -> bool:
        """Whether other tenants have more streams of the request's priority than one that has a request."""
        return self._streams[request.priority].below_share(request.tenant)

    def may_pass(self, request: RouteRequest, held_up: bool) -> bool:
        """Whether the request may go before the head of the queue: its tenant is below its share of the streams, or,
        as ``held_up`` demands, others have to give places to it.
        """
        if not held_up and self.below_share(request):
            return True
        return any(w.gives_s(request) < math.inf for w in self.router.view(request.priority).workers.values())

    # -- inside --------------------------------------------------------------------------------------------------

    def _full(self, request: RouteRequest, decision: Decision, now: float) -> bool:
        """Whether no place on the worker is sure to come free soon. A request that was sent too early would stand in
        the worker's own queue, where nothing can be decided about it any more.
        """
        usual = float(request.expected_output_tokens)
        worker, given = self.router.view(request.priority).workers[decision.decode], self._given(request, decision)
        if request.priority == "batch":
            return not _takes(request, worker) and not given
        if max(decision.wait - decision.behind - given, decision.behind) > self.config.window_s:
            return True
        return not given and worker.place_s(request.streams, usual, now, sure=True) > self.config.window_s

    def _given(self, request: RouteRequest, decision: Decision) -> float:
        """Seconds of the wait that pass until other tenants give a place to the request; 0 where they need not."""
        worker = self.router.view(request.priority).workers[decision.decode]
        return decision.place if worker.gives_s(request) < math.inf else 0.0

    def _crowded(self, request: RouteRequest, decision: Decision, now: float) -> bool:
        """Whether the request would slow the streams on the worker, and those that places are kept for, beyond the
        target between tokens. A tenant with fewer streams than others may exceed it a little, so that it need not wait
        until one of theirs ends. A worker without streams takes any request.
        """
        target, streams = self.config.targets.itl, self._streams[request.priority]
        if target is None or request.priority == "batch" or not streams or not decision.batch:
            return False
        costs, length = self.router.costs, request.prompt_tokens + request.expected_output_tokens
        itl = decision.itl + streams.kept_from(request.tenant, now) * (costs.d1 + costs.d2 * length)
        return itl > target * (self.config.stretch if self.below_share(request) else 1.0)

    def _late(self, request: RouteRequest, now: float, ttft: float, wait: float, given: float) -> Refusal | None:
        """``given``: seconds of both that other tenants have to give a place to the request. A target does not count
        them, or who takes all places would have the others refused.
        """
        deadline = request.deadline
        if deadline is None:
            # Batch requests have the time that they need.
            if self.config.targets.ttft is None or request.priority == "batch":
                return None
            ttft, wait = ttft - given, wait - given
            # A long prompt may take longer: it is refused for its wait, not for its length.
            deadline = request.arrived_at + max(self.config.targets.ttft, self.config.patience * (ttft - wait))
        if now + ttft + self._margin <= deadline:
            return None
        # A refusal gives no measurement, so each one shrinks the margin; or a too large one would refuse for ever.
        self._margin *= MARGIN_DECAY
        return self._refusal(wait, "its first token would come too late")

    def _refusal(self, wait: float, reason: str) -> Refusal:
        return Refusal(min(max(wait, 0.0), self.config.retry_cap_s), reason)

    def _admit(self, request: RouteRequest, decision: Decision, now: float) -> None:
        self.router.commit(request, decision, now)
        output = min(request.expected_output_tokens, request.max_tokens) * request.streams
        self._forget(request.id)
        admitted = _Admitted(
            request.tenant,
            request.priority,
            request.streams,
            decision.uncached,
            output,
            now + decision.ttft,
            request.long,
        )
        if admitted.long:
            self.lanes.enter(decision.compute, now)
        self._admitted[request.id] = admitted
        self._streams[request.priority].begin(admitted.tenant, admitted.streams)
        self.in_flight.prefill += admitted.prefill
        self.in_flight.decode += admitted.decode

    def _prefilled(self, admitted: _Admitted) -> None:
        self.in_flight.prefill -= admitted.prefill
        if admitted.long:
            self.lanes.leave()
        admitted.prefill, admitted.due, admitted.long = 0, None, False

    def _forget(self, request_id: str, now: float | None = None) -> None:
        admitted = self._admitted.pop(request_id, None)
        if admitted is not None:
            self.in_flight.prefill -= admitted.prefill
            if admitted.long:
                self.lanes.leave()
            self.in_flight.decode -= admitted.decode
            self._streams[admitted.priority].end(admitted.tenant, now, admitted.streams)


def _patient(request: RouteRequest) -> bool:
    """Whether the request has all the time that it needs."""
    return request.priority == "batch" and request.deadline is None and not request.reject_if_busy


def _takes(request: RouteRequest, worker: Worker) -> bool:
    """Whether the worker has a place for a batch request, or one in its queue: it begins with those that stand there
    without a pause, and lets others pass them.
    """
    places = worker.load.max_seqs
    return worker.batch + request.streams <= places + max(QUEUED_LEAST, int(places * QUEUED_PART))


def _cached(request: RouteRequest, decision: Decision) -> int:
    """Prompt tokens that the chosen workers need not compute. The last one is always computed."""
    return max(request.prompt_tokens - decision.uncached, 0)
