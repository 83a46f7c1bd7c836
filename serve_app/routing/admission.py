"""Take a request, let it wait, or refuse it at once: by tokens in flight and the predicted time to the first token.

A request is refused exactly when it is predicted to be late, and told how long the wait would be. What is let in but
can't be placed without queueing on a worker waits in the gateway, where order can still be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.routing.fairness import FairQueue
from serve_app.routing.router import Router
from serve_app.routing.streams import Streams
from serve_app.routing.types import Decision, Refusal, RouteRequest

MARGIN_GAIN = 0.1
MARGIN_CAP_S = 1.0
MARGIN_DECAY = 0.9


@dataclass(slots=True, frozen=True)
class Targets:
    """Latency targets of one model, seconds; None is no target."""

    ttft: float | None = None
    itl: float | None = None


@dataclass(slots=True, frozen=True)
class AdmissionConfig:
    targets: Targets = Targets()
    # For prompts that take longer than the target by themselves: how many times that their first token may take.
    patience: float = 1.5
    # Workers keep about this much prefill queued: enough not to run dry between two reports, no more.
    window_s: float = 0.15
    # Waiting for less than this is not called waiting by reject_if_busy.
    busy_s: float = 0.05
    # Refused above this whatever the target: a bound on the gateway's memory.
    max_waiting_tokens: int = 50_000_000
    retry_cap_s: float = 600.0
    # Of the target between tokens, for a tenant below its share of the streams.
    stretch: float = 1.25
    # Of the time in the queue that a request's deadline leaves, kept for errors: under overload the queue is as long as
    # deadlines allow, and each small error would make somebody late for whom work has been done by then.
    slack: float = 0.25


class DrainMeter:
    """How fast waiting requests get their turns, whatever holds them up."""

    GAIN = 0.05
    # After this long without a turn what was measured says nothing of now.
    FRESH_S = 30.0

    def __init__(self) -> None:
        self._seconds = 0.0  # from one turn to the next while others wait
        self._last: float | None = None
        self._others = False

    def turn(self, now: float, waiting: int) -> None:
        """A request has its turn, and ``waiting`` others have not. Turns given together count as such: 0 seconds."""
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
    """Tokens admitted and not yet done, per stage."""

    prefill: int = 0
    decode: int = 0


@dataclass(slots=True)
class _Admitted:
    tenant: str
    prefill: int
    decode: int


class Admission:
    """One per model and gateway; shares its :class:`Router` and its :class:`FairQueue`.

    ``consider`` at arrival, ``place`` when it is a request's turn, ``started`` at its first token, ``finished`` at its
    end.
    """

    def __init__(self, router: Router, queue: FairQueue, config: AdmissionConfig | None = None) -> None:
        self.router = router
        self.queue = queue
        self.config = config or AdmissionConfig()
        self.in_flight = InFlight()
        self._admitted: dict[str, _Admitted] = {}
        self._streams = Streams()
        self._drain = DrainMeter()
        self._margin = 0.0  # seconds by which first tokens come later than predicted

    def consider(self, request: RouteRequest, now: float) -> Refusal | None:
        """At arrival: None if the request may wait its turn, or why it can't and when to try again."""
        decision = self.router.choose(request, now)
        if decision is None:
            return None  # no worker up yet: whether to wait for a cold start is the caller's choice
        queued = self.queued_seconds(request, now)
        wait = queued + decision.wait
        if self.queue.waiting_tokens() + request.prompt_tokens > self.config.max_waiting_tokens:
            return self._refusal(wait, "too many tokens wait for this model")
        if request.reject_if_busy and wait > self.config.busy_s:
            return self._refusal(wait, "busy, and the request said not to wait")
        # What the others in the queue take can't be foreseen as well as what the request itself takes.
        slack = 1.0 if request.deadline is None else 1.0 - self.config.slack
        return self._late(request, now, queued / slack + decision.ttft, wait)

    def place(self, request: RouteRequest, now: float) -> Decision | Refusal | None:
        """When it is ``request``'s turn: where it goes; None while every worker has enough queued; or too late now."""
        decision = self.router.choose(request, now)
        if decision is None:
            return None
        wait = decision.wait
        late = self._late(request, now, decision.ttft, wait)
        if late is not None:
            return late
        if wait > self.config.window_s or self._crowded(request, decision, now):
            return None
        self._drain.turn(now, len(self.queue) - (request.id in self.queue))
        self.router.commit(request, decision, now)
        output = min(request.expected_output_tokens, request.max_tokens)
        self._forget(request.id)
        self._admitted[request.id] = _Admitted(request.tenant, decision.uncached, output)
        self._streams.begin(request.tenant)
        self.in_flight.prefill += decision.uncached
        self.in_flight.decode += output
        return decision

    def started(self, request_id: str) -> None:
        """The first token is there: its prompt is no longer in flight."""
        admitted = self._admitted.get(request_id)
        if admitted is not None:
            self.in_flight.prefill -= admitted.prefill
            admitted.prefill = 0

    def arrived(self, predicted: float, actual: float) -> None:
        """A first token came ``actual`` seconds after its request's turn; predictions that were too short make later
        ones more careful.
        """
        error = min(max(actual - predicted, 0.0), MARGIN_CAP_S)
        self._margin += MARGIN_GAIN * (error - self._margin)

    def finished(self, request_id: str, now: float | None = None) -> None:
        """Ended in whatever way; ``now`` if its client has the answer and may ask anew."""
        self._forget(request_id, now)
        self.router.finished(request_id)

    def queued_seconds(self, request: RouteRequest, now: float = 0.0) -> float:
        """How long the requests that would go before this one keep the workers busy, about: by the prompts they bring,
        and by how fast others that waited got their turns.
        """
        ahead = self.queue.ahead(request)
        if not ahead:
            return 0.0
        requests = ahead * len(self.queue) / max(self.queue.waiting_tokens(), 1)
        return max(ahead * self.router.seconds_per_token(), self._drain.seconds(requests, now))

    # -- inside --------------------------------------------------------------------------------------------------

    def below_share(self, tenant: str) -> bool:
        """Whether others have more streams than a tenant that has a request."""
        return self._streams.below_share(tenant)

    def _crowded(self, request: RouteRequest, decision: Decision, now: float) -> bool:
        """Whether one more stream would slow those on the worker, and those that places are kept for, beyond the target
        between tokens. A tenant with fewer streams than others may stretch it a little: it need not wait until one of
        theirs ends.
        """
        target = self.config.targets.itl
        if target is None or not self._streams:
            return False
        costs, length = self.router.costs, request.prompt_tokens + request.expected_output_tokens
        itl = decision.itl + self._streams.kept_from(request.tenant, now) * (costs.d1 + costs.d2 * length)
        return itl > target * (self.config.stretch if self.below_share(request.tenant) else 1.0)

    def _late(self, request: RouteRequest, now: float, ttft: float, wait: float) -> Refusal | None:
        deadline = request.deadline
        if deadline is None:
            if self.config.targets.ttft is None:
                return None
            # A prompt that takes long by itself has longer: its wait may be refused, its length may not.
            deadline = request.arrived_at + max(self.config.targets.ttft, self.config.patience * (ttft - wait))
        if now + ttft + self._margin <= deadline:
            return None
        # Nobody let in, nothing learned: what the margin keeps out makes it smaller.
        self._margin *= MARGIN_DECAY
        return self._refusal(wait, "its first token would come too late")

    def _refusal(self, wait: float, reason: str) -> Refusal:
        return Refusal(min(max(wait, 0.0), self.config.retry_cap_s), reason)

    def _forget(self, request_id: str, now: float | None = None) -> None:
        admitted = self._admitted.pop(request_id, None)
        if admitted is not None:
            self.in_flight.prefill -= admitted.prefill
            self.in_flight.decode -= admitted.decode
            self._streams.end(admitted.tenant, now)
