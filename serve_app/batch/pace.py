"""How many requests of each model a runner keeps under way, and how much batches ask for.

An idle worker is filled: its places, and a little of its queue, so that it never runs dry. Where real-time requests
are, a worker gets as many as ride along in its steps, and at least one, which its engine gives the least share. Models
that share the cores of a node know nothing of each other's steps: beside real-time requests on another one they get one
request at a time, after pauses that leave the others nearly all of the time.

A batch whose deadline is further away than its rest takes asks for nothing more. Nearer to it its share of a busy
worker's time rises, and where even a whole worker would be late, so do the replicas.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.batch.job import Done
from serve_app.state.deferred.batches import Waiting

# Of a worker's time, beside real-time requests: the least, and the most that a deadline can ask for.
LEAST, MOST = 0.05, 0.5
# Requests beyond a worker's places, as a part of these, and at least so many.
AHEAD_PART, AHEAD_LEAST = 0.375, 3
# For so long after a report of real-time requests they are taken to be there.
HOLD_S = 0.5
# A model that was asked to start and has not in so long holds no other one up; and up to so many cores models start one
# after another.
START_S = 120.0
SMALL_CORES = 8
# The rate is that of about so many seconds, and tells nothing before it was watched for this long.
RATE_S = 60.0
WATCHED_S = 20.0
# Of the time that is left, what is kept for surprises; share and replicas rise when this part of the rest is needed.
MARGIN = 0.1
EASY = 0.5


@dataclass(slots=True, frozen=True)
class WorkerState:
    """``places``: sequences that it runs at once. ``realtime``: real-time requests there. ``rows``: batch requests that
    its steps have room for beside these.
    """

    node: str
    places: int
    realtime: int = 0
    rows: int = 0


@dataclass(slots=True, frozen=True)
class ModelState:
    """``shares_cores``: its workers compute on cores of their node. ``sleeps``: it has no worker, and the first request
    starts one. ``calls``: requests at once where no worker reports (encoders): as many as its replicas take without
    asking for more of them.
    """

    workers: Sequence[WorkerState] = ()
    shares_cores: bool = True
    sleeps: bool = False
    calls: int = 1


class Rate:
    """Requests per second, as they end."""

    def __init__(self, now: float) -> None:
        self._since = self._at = now
        self._count = 0.0

    def add(self, now: float) -> None:
        self._decay(now)
        self._count += 1.0

    def value(self, now: float) -> float | None:
        """None before it was watched long enough."""
        if now - self._since < WATCHED_S:
            return None
        self._decay(now)
        return self._count / (RATE_S * (1.0 - math.exp(-(now - self._since) / RATE_S)))

    def _decay(self, now: float) -> None:
        self._count *= math.exp(-(now - self._at) / RATE_S)
        self._at = now


class Ramp:
    """What the rest of a model's batches asks for: ``share`` of a busy worker's time, and ``replicas``."""

    def __init__(self, now: float) -> None:
        self.share = LEAST
        self.replicas = 0.0
        self._rate = Rate(now)

    def ended(self, now: float) -> None:
        self._rate.add(now)

    def plan(self, requests: int, left_s: float, present: int, now: float) -> None:
        """``requests`` are to be done within ``left_s`` seconds, on ``present`` replicas as it is."""
        rate = self._rate.value(now)
        # Where nothing has ended at all, it is not time that is short.
        if not rate or not requests:
            self.share, self.replicas = (self.share, self.replicas) if requests else (LEAST, 0.0)
            return
        wanted = requests / max(left_s * (1.0 - MARGIN), 1.0)
        # At 1 the rest takes all the time that there is.
        strain = wanted / max(rate, 1e-9)
        self.share = min(MOST, max(LEAST, LEAST + (MOST - LEAST) * (strain - EASY) / (1.0 - EASY)))
        needed = strain * max(present, 1)
        self.replicas = needed if strain > 1.0 or (self.replicas and needed > 1.0) else 0.0


class Pace:
    """``look()`` says what is known of each model now. ``ask(model, ramp)`` hears what its batches ask for when that
    changes. ``clock`` gives seconds.
    """

    def __init__(
        self,
        look: Callable[[], Mapping[str, ModelState]],
        ask: Callable[[str, Ramp], None] = lambda model, ramp: None,
        *,
        cores: int = SMALL_CORES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._ask = ask
        self._cores = cores
        self._clock = clock
        self._ramps: dict[str, Ramp] = {}
        self._asked: dict[str, tuple[float, float]] = {}
        # When real-time requests were last seen, by node and model; when a model was asked to start; and when one that
        # shares cores with real-time requests may have its next request.
        self._seen: dict[tuple[str, str], float] = {}
        self._starting: dict[str, float] = {}
        self._next: dict[str, float] = {}
        # Models with something left, those with the earliest deadline first.
        self._order: list[str] = []

    # -- what a runner asks

    def plan(self, waiting: Mapping[str, Waiting], now: float) -> None:
        """What all runners still have to do, by model. ``now``: unix seconds, as deadlines are."""
        clock, states = self._clock(), self._look()
        self._order = sorted((m for m in waiting if m), key=lambda m: waiting[m].deadline)
        for model in {*self._order, *self._ramps}:
            left = waiting.get(model)
            ramp = self._ramps.setdefault(model, Ramp(clock))
            present = len(states.get(model, ModelState()).workers)
            ramp.plan(left.requests if left else 0, left.deadline - now if left else 0.0, present, clock)
            if self._asked.get(model, (LEAST, 0.0)) != (ramp.share, ramp.replicas):
                self._asked[model] = ramp.share, ramp.replicas
                self._ask(model, ramp)
            if left is None:
                del self._ramps[model]
                self._asked.pop(model, None)

    def room(self, model: str) -> int:
        """Requests of the model that may be under way now."""
        now, states = self._clock(), self._look()
        state = states.get(model)
        if state is None:
            return 1  # it is refused with what is wrong
        self._watch(states, now)
        if state.sleeps:
            return int(self._may_start(model, states, now))
        self._starting.pop(model, None)
        if state.shares_cores and self._beside_others(model, state, now):
            return int(now >= self._next.get(model, -math.inf))
        if not state.workers:
            return state.calls
        return sum(self._room_on(model, worker, now) for worker in state.workers)

    def told(self, model: str, done: Done, seconds: float) -> None:
        """A request has ended, this time, after so many ``seconds``."""
        now = self._clock()
        if done.retry_after is None:
            self._ramps.setdefault(model, Ramp(now)).ended(now)
        share = self.share(model)
        self._next[model] = now + seconds * (1.0 - share) / share

    def share(self, model: str) -> float:
        """Of a worker's time, what the model's batch requests get at least."""
        ramp = self._ramps.get(model)
        return LEAST if ramp is None else ramp.share

    # -- inside

    def _watch(self, states: Mapping[str, ModelState], now: float) -> None:
        for model, state in states.items():
            for worker in state.workers:
                if worker.realtime:
                    self._seen[worker.node, model] = now

    def _beside_others(self, model: str, state: ModelState, now: float) -> bool:
        """Whether real-time requests run on another model of a node of this one."""
        nodes = {worker.node for worker in state.workers}
        # An encoder's workers do not report where they are.
        return any(
            now - at < HOLD_S
            for (node, other), at in self._seen.items()
            if other != model and (node in nodes or not nodes)
        )

    def _room_on(self, model: str, worker: WorkerState, now: float) -> int:
        if now - self._seen.get((worker.node, model), -math.inf) < HOLD_S:
            return max(1, min(worker.rows, worker.places))
        return worker.places + max(AHEAD_LEAST, int(worker.places * AHEAD_PART))

    def _may_start(self, model: str, states: Mapping[str, ModelState], now: float) -> bool:
        """Whether a request may go to a model that sleeps: on a small machine one starts after another."""
        starting = [m for m, at in self._starting.items() if now - at < START_S and m in states and states[m].sleeps]
        if model in starting:
            return True
        if starting and self._cores <= SMALL_CORES:
            return False
        self._starting[model] = now
        return True
