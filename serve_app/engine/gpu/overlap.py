"""An engine that schedules and launches step N + 1 while the device still computes step N.

::

    host    schedule 1 | launch 1 | schedule 2 | launch 2 | take over 1 | schedule 3 | launch 3 | take over 2 | ...
    device             [ step 1              ][ step 2                            ][ step 3                   ]

Step 2 is scheduled on the assumption that every request of step 1 goes on: its token is a placeholder, whose value step
2 takes on the device from what step 1 has sampled. When step 1's tokens have arrived, the assumptions are taken back,
the step is committed as ever, and they are made again for the requests that did go on. A request that ended has then
computed one row too much, into blocks that nobody reads. So scheduler and commit know nothing of all this.

What needs a step's tokens or logits on the host before the next one (drafts, grammars, log-probabilities,
hidden states, n-grams that may not repeat) is run step by step, as in :class:`~serve_app.engine.engine.Engine`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.engine.engine import Engine
from serve_app.engine.gpu.staging import to_device
from serve_app.engine.request import Request, Status
from serve_app.engine.runner import Runner, sample_rows
from serve_app.engine.sampling import draw_tokens
from serve_app.engine.step import Sampled, Scheduled, Step, StepOutput, build_batch

PLACEHOLDER = -1


@dataclass(slots=True)
class Assumption:
    """What scheduling ahead took for granted about one request."""

    item: Scheduled
    appended: bool  # a placeholder

    def undo(self) -> None:
        request = self.item.request
        if self.appended:
            assert request.tokens[-1] == PLACEHOLDER
            request.tokens.pop()
        # A preempted request starts again; its token is sampled once more, and is the same.
        if request.status is Status.RUNNING:
            request.computed -= self.item.count


@dataclass(slots=True)
class Flight:
    """A step that the device is computing."""

    step: Step
    started: float
    token_ids: Tensor  # [S] int64 on the device, in the order of the sampled rows
    arriving: Tensor  # the same on the host, once `arrived`
    arrived: torch.cuda.Event | None
    # Row in `token_ids` of each request that sampled.
    rows: dict[int, int]
    assumptions: list[Assumption] = field(default_factory=list)

    def assume(self, max_model_len: int) -> None:
        """Lets the scheduler go on as if the step were done and no request had ended, except those that must have."""
        for item in self.step.scheduled:
            request = item.request
            if request.status is not Status.RUNNING:
                continue
            request.computed += item.count
            known = len(request.tokens) + 1
            ends = known - request.prompt_len >= request.sampling.max_tokens or known >= max_model_len
            appended = bool(item.samples) and not ends
            if appended:
                request.tokens.append(PLACEHOLDER)
            self.assumptions.append(Assumption(item, appended))

    def take_back(self) -> None:
        """Undoes :meth:`assume`. Of two steps in flight, the later one first."""
        while self.assumptions:
            self.assumptions.pop().undo()

    def sampled(self) -> list[Sampled]:
        """Waits for the tokens; one entry per scheduled request."""
        if self.arrived is not None:
            self.arrived.synchronize()
        token_ids = self.arriving.tolist()
        return [Sampled([token_ids[self.rows[id(s.request)]]] if s.samples else []) for s in self.step.scheduled]


class OverlapEngine(Engine):
    """Same requests, same tokens as :class:`Engine`; outputs of a step come with the next call of :meth:`step`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._flight: Flight | None = None
        self._landed: list[StepOutput] = []  # outputs that wait for the next step to return them
        self._landed_at = 0.0

    @property
    def has_work(self) -> bool:
        return self._flight is not None or bool(self._landed) or super().has_work

    def abort(self, request_id: str, *, export: bool = True) -> bool:
        # Nothing is in the air while a request goes: its tokens are real, and its end finds what it expects.
        if export:
            self._landed += self._land(None)
        else:
            self._crash()
        return super().abort(request_id, export=export)

    def step(self) -> list[StepOutput]:
        outputs, self._landed = self._landed, []
        self.runner.between_steps()
        if not self._may_run_ahead():
            return outputs + self._land(None) + super().step()
        started = time.perf_counter()
        step = self.scheduler.next()
        following = launch(self.runner, step, self._flight, started) if step.scheduled else None
        if following is not None:
            following.assume(self.scheduler.max_model_len)
        return outputs + self._land(following)

    def _may_run_ahead(self) -> bool:
        if self.runner.observer is not None:
            return False
        if self.speculation is not None and not self.speculation.runs_plain(self.scheduler.drafted_for):
            return False
        return all(runs_ahead(r) for r in self.scheduler.running) and all(runs_ahead(r) for r in self.scheduler.waiting)

    def _land(self, following: Flight | None) -> list[StepOutput]:
        """Takes over the step in flight, if there is one; ``following`` is in flight from then on."""
        flight, self._flight = self._flight, following
        if flight is None:
            return []
        for assumed in (following, flight):
            if assumed is not None:
                assumed.take_back()
        sampled = flight.sampled()
        # Those that ended with the step before, or gave up their place since, have nothing to take over.
        going = [(s, r) for s, r in zip(flight.step.scheduled, sampled, strict=True) if _goes_on(s)]
        step = replace(flight.step, scheduled=[s for s, _ in going])
        self.stats.under_way += 1 if following is None else 2
        outputs = self._take_over(step, [r for _, r in going], max(flight.started, self._landed_at))
        self._landed_at = time.perf_counter()
        if following is not None:
            following.assume(self.scheduler.max_model_len)
        return outputs

    def _crash(self) -> None:
        """Forgets the step in flight, which has failed."""
        if self._flight is not None:
            self._flight.take_back()
        self._flight = None


def _goes_on(item: Scheduled) -> bool:
    return item.request.status is Status.RUNNING


def runs_ahead(request: Request) -> bool:
    """Whether a request's next step can be launched before its last token is known to the host."""
    sampling = request.sampling
    told = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    reads = request.constraint is not None or request.rules is not None
    return not (told or reads or request.draft)


@torch.inference_mode()
def launch(runner: Runner, step: Step, before: Flight | None, started: float) -> Flight:
    """Starts ``step`` on the device without waiting for ``before``, whose tokens it takes there."""
    runner.load(step)
    batch = build_batch(step.scheduled, runner.kv)
    places, sources, at = [], [], 0
    for item in step.scheduled:
        at += item.count
        if item.request.tokens[-1] == PLACEHOLDER and item.start + item.count == len(item.request.tokens):
            assert before is not None
            places.append(at - 1)
            sources.append(before.rows[id(item.request)])
    if before is not None and places:
        at_rows, from_rows = to_device([np.array(places), np.array(sources)], batch.input_ids.device)
        batch.input_ids.index_copy_(0, at_rows, before.token_ids.index_select(0, from_rows))
    logits = runner.forward(batch)
    rows = [row for item in step.scheduled for row in sample_rows(item, logits.shape[1])]
    token_ids = batch.sample_rows
    if rows:
        # What a sampled row reads is its request's last token.
        token_ids = draw_tokens(logits, rows, batch.input_ids[batch.sample_rows])
    arriving, arrived = token_ids, None
    if token_ids.is_cuda:
        arriving = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        arriving.copy_(token_ids, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    sampling = [item.request for item in step.scheduled if item.samples]
    return Flight(step, started, token_ids, arriving, arrived, {id(r): i for i, r in enumerate(sampling)})
