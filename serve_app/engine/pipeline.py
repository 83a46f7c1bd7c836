"""An engine over stages that work at the same time: of each of several groups of requests one step is under way.

::

    rank 0   plan A, stage 0 | plan B, stage 0 | sample A, plan A', stage 0 | sample B, plan B', stage 0 | ...
    rank 1                   [ A, stage 1     ][ B, stage 1               ][ A', stage 1               ]

As many steps are under way as there are stages. A request that waits for what its step gives is in no other; of a
prompt one piece follows another, since every stage computes steps in the order in which they were begun; where layers
keep states, of which books are kept when a step has ended, a text has one step under way and no more. For the same
reason blocks of a request that is aborted may be given to others while a step still writes to them. Nobody else makes
way while a step of his is under way, so that none is computed in vain.

Scheduling takes for granted that a step which is under way computes its tokens. Before it is committed that is taken
back, and afterwards granted again to those that are still under way: so scheduler and commit know nothing of all this.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, replace

from serve_app.costs.stages import rows_of_a_step, tokens_of_a_step
from serve_app.costs.steps import StepSample
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request, Status
from serve_app.engine.runner import Computing, Runner
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.speculation.speculate import Looked
from serve_app.engine.step import Scheduled, Step, StepOutput


@dataclass(slots=True)
class Flight:
    """A step that is under way."""

    step: Step
    started: float
    computing: Computing
    looked: Looked | None
    alone: bool = False  # none of its requests may be in another

    def going(self) -> list[Scheduled]:
        """Without requests that have been aborted since."""
        return [item for item in self.step.scheduled if item.request.status is Status.RUNNING]

    def assume(self) -> None:
        """Lets the scheduler go on as if the step were done, but for what only its end can tell."""
        for item in self.going():
            item.request.computed += item.count
            item.request.under_way += 1
            item.request.held = self.alone or bool(item.samples or item.scores)

    def take_back(self) -> None:
        """Undoes :meth:`assume`. Of several steps under way, the latest first."""
        for item in self.going():
            item.request.computed -= item.count
            item.request.under_way -= 1
            item.request.held = False


class PipelineEngine(Engine):
    """Same requests, same tokens as :class:`Engine`. ``depth``: steps that are under way at a time."""

    def __init__(self, runner: Runner, scheduler: Scheduler, *, depth: int) -> None:
        super().__init__(runner, scheduler)
        self.depth = depth
        scheduler.max_batch_tokens = tokens_of_a_step(scheduler.max_batch_tokens, depth)
        self._flights: deque[Flight] = deque()
        self._landed_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._flights) or super().has_work

    def abort(self, request_id: str, *, export: bool = True) -> bool:
        if not export:
            self._crash()
            return super().abort(request_id, export=False)
        self._take_back()
        try:
            return super().abort(request_id)
        finally:
            self._assume()

    def step(self) -> list[StepOutput]:
        self.runner.between_steps()
        while len(self._flights) < self.depth and self._begin():
            pass
        return self._land() if self._flights else []

    def _begin(self) -> bool:
        """Begins with the next step. False: there is nothing that could be in it."""
        started = time.perf_counter()
        scheduler = self.scheduler
        generating = sum(_generates(r) for r in scheduler.running)
        scheduler.rows = rows_of_a_step(generating, self.depth)
        looked = None
        if self.speculation is not None:
            if rows := self._next_rows():
                self.speculation.before_step(rows, scheduler.max_model_len)
            looked = self.speculation.set_aside()
        step = scheduler.next()
        if not step.scheduled:
            return False
        flight = Flight(step, started, self.runner.begin(step), looked, scheduler.states.needed)
        flight.assume()
        self._flights.append(flight)
        return True

    def _next_rows(self) -> list[Request]:
        """The requests that the next step will probably have, of those that tokens are drafted for."""
        free = [r for r in self.scheduler.drafted_for if not r.held]
        generating = [r for r in free if _generates(r)]
        return generating[: self.scheduler.rows] + [r for r in free if not _generates(r)]

    def _land(self) -> list[StepOutput]:
        """Waits for the oldest step and takes it over."""
        flight = self._flights[0]
        items, going = flight.step.scheduled, flight.going()
        gone = {i for i, item in enumerate(items) if item.request.status is not Status.RUNNING}
        sampled = self.runner.finish(flight.computing, gone)
        self._take_back()
        self.stats.under_way += len(self._flights)
        self._flights.popleft()
        step = replace(flight.step, scheduled=going)
        kept = [result for index, result in enumerate(sampled) if index not in gone]
        outputs = self._take_over(step, kept, max(flight.started, self._landed_at), flight.looked)
        self._landed_at = time.perf_counter()
        self._assume()
        return outputs

    def _measure(self, step: Step, seconds: float) -> StepSample:
        """A step that came so long after the one before it, as one that had all requests under way in it: what others
        predict by it is when a request's next token comes.
        """
        others = [item for flight in self._flights for item in flight.step.scheduled]
        return self.meter.record([*step.scheduled, *others], seconds * (1 + len(self._flights)))

    def _texts_wait(self) -> bool:
        return any(item.awaited for flight in self._flights for item in flight.step.scheduled)

    def _take_back(self) -> None:
        for flight in reversed(self._flights):
            flight.take_back()

    def _assume(self) -> None:
        for flight in self._flights:
            flight.assume()

    def _crash(self) -> None:
        """Forgets the steps under way, one of which has failed. What ranks still send is taken in its order."""
        self._take_back()
        while self._flights:
            with contextlib.suppress(Exception):
                self._flights.popleft().computing.logits()


def _generates(request: Request) -> bool:
    """Whether all that is known of it is computed, but for its last token at most."""
    return len(request.tokens) - request.computed <= 1
