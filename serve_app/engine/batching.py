"""Batches over requests: many callers' items share steps of one thread, and each caller gets its own results back.

One thread owns the model. A step takes a fair share of every waiting call, in the order of arrival, until the budget
is full::

    call A (3000 texts)  [a0 a1 a2 a3 ... ] ─┐ half the budget each
    call B (1 text)      [b0]               ─┴──> [b0 a0 a1 a2] ──> forward ──> results

Calls of batch work wait apart. Beside others they get 5 % of the budget, otherwise whole steps, which are short while
others come.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from serve_app.engine.encoder.types import EncodeFailed, EncoderClosed, EncodeStats
from serve_app.engine.meter import StepClock

# Of the budget, what batch calls get beside others.
BATCH_SHARE = 0.05
# For so long after the last other call a step of batch calls alone has this part of the budget.
NEAR_S = 1.0
NEAR_PART = 0.25

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Call:
    """What one caller has submitted. ``sizes``: of its items, in what the budget counts; ``asked``: what is to be done
    with them. A step has calls of one ``kind`` only.
    """

    items: Sequence[Any]
    sizes: Sequence[int]
    asked: Any = None
    kind: Hashable = None
    batch: bool = False
    future: Future[Any] = field(default_factory=Future)
    results: Any = None
    # Indices into items, smallest first, so that a step takes equal sizes.
    waiting: deque[int] = field(init=False)
    left: int = field(init=False)
    size_waiting: int = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = deque(sorted(range(len(self.items)), key=self.sizes.__getitem__))
        self.left = len(self.items)
        self.size_waiting = int(sum(self.sizes))


Picked = list[tuple[Call, int]]


class Batcher(ABC):
    """Runs items in one thread, a ``budget`` of their sizes at a time. A step is also how long a new caller waits
    before its first share.
    """

    def __init__(self, *, budget: int, name: str) -> None:
        if budget < 1:
            raise ValueError(f"the budget of {name} is {budget}; give at least 1")
        self.budget = budget
        self._calls: deque[Call] = deque()
        self._batch: deque[Call] = deque()
        # What batch calls have not had of their share, and when another call came last.
        self._owed = 0.0
        self._seen = -math.inf
        self._stats = EncodeStats()
        self._changed = threading.Condition()
        self._closed: BaseException | None = None
        self.clock = StepClock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def step(self, picked: Picked) -> tuple[Sequence[Any], int]:
        """The results of items, smallest first, in their order; and what was computed for them, padding included."""

    def keep(self, call: Call, index: int, result: Any) -> None:
        """Puts an item's result among its call's."""
        if call.results is None:
            call.results = [None] * len(call.items)
        call.results[index] = result

    def finish(self, call: Call) -> Any:
        """What the caller gets, once all its items have results."""
        return call.results or []

    def enqueue(self, call: Call) -> Future[Any]:
        """The future of :meth:`finish`; cancelling it frees the queue. Raises :class:`EncoderClosed`."""
        with self._changed:
            if self._closed is not None:
                raise EncoderClosed("this worker is shut down") from self._closed
            self._stats.calls += 1
            if call.items:
                self._queue(call).append(call)
                if not call.batch:
                    self._seen = time.monotonic()
                self._changed.notify()
        if not call.items:
            call.future.set_result(self.finish(call))
        return call.future

    def stats(self) -> EncodeStats:
        """A consistent copy of the counters."""
        with self._changed:
            waiting = [c for c in (*self._calls, *self._batch) if not c.future.cancelled()]
            return replace(
                self._stats,
                queued_calls=len(waiting),
                queued_sequences=sum(len(c.waiting) for c in waiting),
                queued_tokens=sum(c.size_waiting for c in waiting),
            )

    def close(self, cause: BaseException | None = None, *, timeout: float | None = None) -> None:
        """Stops after the running step; calls not answered by then fail with :class:`EncoderClosed` from
        ``cause``.
        """
        with self._changed:
            self._closed = self._closed or cause or EncoderClosed("closed")
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # each thread has an OpenMP setting of its own
        picked: Picked | None = []
        try:
            while (picked := self._next()) is not None:
                self._step(picked)
        except BaseException as error:  # a bug here must not leave callers waiting for ever
            log.exception("the batching thread died")
            with self._changed:
                self._closed = error
            self._fail({call for call, _ in picked or []}, error)
        finally:
            self._fail_waiting()

    def _next(self) -> Picked | None:
        with self._changed:
            while self._closed is None:
                for call in [c for c in (*self._calls, *self._batch) if c.future.cancelled()]:
                    self._queue(call).remove(call)
                    self._stats.cancelled_calls += 1
                if self._calls or self._batch:
                    return self._pick()
                self._changed.wait()
        return None

    def _queue(self, call: Call) -> deque[Call]:
        return self._batch if call.batch else self._calls

    def _pick(self) -> Picked:
        """What the next step computes."""
        if not self._batch:
            return self._share_out(self._calls, self.budget)
        if not self._calls:
            near = time.monotonic() - self._seen < NEAR_S
            return self._share_out(self._batch, int(self.budget * (NEAR_PART if near else 1.0)))
        picked = self._share_out(self._calls, self.budget)
        first = self._batch[0]
        size = first.sizes[first.waiting[0]]
        self._owed = min(self._owed + BATCH_SHARE * _total(picked), max(self.budget, size))
        if size <= self._owed and first.kind == picked[0][0].kind:
            riding = self._share_out(self._batch, int(self._owed))
            self._owed -= _total(riding)
            picked += riding
        return picked

    def _share_out(self, calls: deque[Call], budget: int) -> Picked:
        """Items of one kind, that of the call which comes first. Calls of other kinds come first in the next step."""
        kind = calls[0].kind
        others = [call for call in calls if call.kind != kind]
        if not others:
            return self._round_robin(calls, budget)
        same = deque(call for call in calls if call.kind == kind)
        picked = self._round_robin(same, budget)
        calls.clear()
        calls.extend([*others, *same])
        return picked

    def _round_robin(self, calls: deque[Call], budget: int) -> Picked:
        """Each waiting call gives a quantum of the budget, then goes behind the others."""
        picked: Picked = []
        total = 0
        quantum = max(budget // len(calls), 1)
        while calls:
            call, taken = calls[0], 0
            while call.waiting and taken < quantum:
                size = call.sizes[call.waiting[0]]
                if picked and total + size > budget:
                    # It stays first in line, so the next step begins with it: nothing is overtaken for ever.
                    if taken:
                        calls.rotate(-1)
                    return picked
                index = call.waiting.popleft()
                call.size_waiting -= size
                taken += size
                total += size
                picked.append((call, index))
            calls.popleft()
            if call.waiting:
                calls.append(call)
        return picked

    def _step(self, picked: Picked) -> None:
        picked.sort(key=lambda p: p[0].sizes[p[1]])
        started = time.perf_counter()
        try:
            with self.clock:
                results, computed = self.step(picked)
        except Exception as error:
            log.exception("a batch of %d items failed", len(picked))
            self._fail({call for call, _ in picked}, error)
            return
        spent = time.perf_counter() - started
        with self._changed:
            stats = self._stats
            stats.batches += 1
            stats.sequences += len(picked)
            stats.tokens += _total(picked)
            stats.computed_tokens += computed
            stats.busy_s += spent
        for (call, index), result in zip(picked, results, strict=True):
            self.keep(call, index, result)
            call.left -= 1
            if call.left:
                continue
            if call.future.set_running_or_notify_cancel():
                call.future.set_result(self.finish(call))
            else:
                with self._changed:
                    self._stats.cancelled_calls += 1

    def _fail(self, calls: set[Call], cause: BaseException) -> None:
        with self._changed:
            self._calls = deque(c for c in self._calls if c not in calls)
            self._batch = deque(c for c in self._batch if c not in calls)
            self._stats.failed_calls += len(calls)
        for call in calls:
            error = EncodeFailed(f"the model's forward pass failed: {cause}")
            error.__cause__ = cause
            _set_exception(call.future, error)

    def _fail_waiting(self) -> None:
        with self._changed:
            calls = [*self._calls, *self._batch]
            self._calls, self._batch = deque(), deque()
            self._stats.failed_calls += len(calls)
        for call in calls:
            error = EncoderClosed("this worker was shut down before the call was answered; send it again")
            error.__cause__ = self._closed
            _set_exception(call.future, error)


def _total(picked: Picked) -> int:
    return int(sum(call.sizes[i] for call, i in picked))


def _set_exception(future: Future[Any], error: Exception) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    except InvalidStateError:  # answered already
        return
