"""Token-budget batching for encoders: many callers' texts become flat batches, and each caller gets its own
rows back.

One thread owns the model. A step takes a fair share of every waiting call, in the order of arrival, until
the token budget is full, and runs them as one flat batch::

    call A (3000 texts)  [a0 a1 a2 a3 ... ] ─┐ half the budget each
    call B (1 text)      [b0]               ─┴──> [b0 a0 a1 a2] by length ──> forward ──> rows

Calls of batch work wait apart. Beside others they get 5 % of the tokens, otherwise whole steps, which are short while
others come.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from serve_app.engine.encoder.types import (
    EncodeBatch,
    EncodeError,
    EncodeFailed,
    Encoder,
    EncoderClosed,
    EncodeStats,
    Ids,
    Readout,
    Rows,
    SequenceTooLong,
)
from serve_app.engine.meter import StepClock

# Of the tokens, what batch calls get beside others.
BATCH_SHARE = 0.05
# For so long after the last other call a step of batch calls alone has this part of the budget.
NEAR_S = 1.0
NEAR_PART = 0.25

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    sequences: list[Ids]
    type_ids: list[Ids] | None
    readout: Readout
    waiting: deque[int]  # indices into sequences, shortest first, so that a step takes equal lengths
    future: Future[Any] = field(default_factory=Future)
    rows: Any = None  # an array, or with token heads a list of rows
    left: int = 0
    tokens_waiting: int = 0
    batch: bool = False


class EncodeBatcher:
    """Runs an :class:`Encoder` in one thread, a token budget at a time.

    ``token_budget`` is the tokens of a step; a model that pads bounds its padding itself (see
    ``padded_tokens``). A step is also how long a new caller waits before its first share, and on CPUs its
    activations should stay in the cache, hence the modest default.
    """

    def __init__(self, model: Encoder, *, token_budget: int = 1024, name: str = "encoder") -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget is {token_budget}; give at least 1")
        self.model = model
        self.token_budget = token_budget
        self._calls: deque[_Call] = deque()
        self._batch: deque[_Call] = deque()
        # Tokens that batch calls have not had of their share, and when another call came last.
        self._owed = 0.0
        self._seen = -math.inf
        self._stats = EncodeStats()
        self._changed = threading.Condition()
        self._closed: BaseException | None = None
        self.clock = StepClock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        sequences: Sequence[Ids],
        readout: Readout | None = None,
        *,
        type_ids: Sequence[Ids] | None = None,
        batch: bool = False,
    ) -> Future[Any]:
        """Queues token id sequences (special tokens included), each [n] int32; ``type_ids`` are the segments
        of pairs. ``batch``: it takes what other calls leave.

        The future gives [n, d] float32 vectors or [n] scores in the order of ``sequences``, with token heads a
        list of n rows (see :class:`Readout`). Cancelling it
        frees the queue. Raises :class:`SequenceTooLong`, :class:`EncodeError` for other unusable input,
        :class:`EncoderClosed`.
        """
        readout = readout or self.model.readout
        self._check(sequences, type_ids, readout)
        lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        call = _Call(
            sequences=list(sequences),
            type_ids=None if type_ids is None else list(type_ids),
            readout=readout,
            waiting=deque(np.argsort(lengths, kind="stable").tolist()),
            left=len(sequences),
            tokens_waiting=int(lengths.sum()),
            batch=batch,
        )
        with self._changed:
            if self._closed is not None:
                raise EncoderClosed("this encoder is shut down") from self._closed
            self._stats.calls += 1
            if sequences:
                self._queue(call).append(call)
                if not batch:
                    self._seen = time.monotonic()
                self._changed.notify()
        if not sequences:
            call.future.set_result(readout.finish(np.zeros((0, self.model.dimensions), np.float32)))
        return call.future

    def stats(self) -> EncodeStats:
        """A consistent copy of the counters."""
        with self._changed:
            waiting = [c for c in (*self._calls, *self._batch) if not c.future.cancelled()]
            return replace(
                self._stats,
                queued_calls=len(waiting),
                queued_sequences=sum(len(c.waiting) for c in waiting),
                queued_tokens=sum(c.tokens_waiting for c in waiting),
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

    def _check(self, sequences: Sequence[Ids], type_ids: Sequence[Ids] | None, readout: Readout) -> None:
        model = self.model
        if (readout.pooling == "score") != (model.readout.pooling == "score"):
            usual = model.readout.pooling
            raise EncodeError(f"this model does not give {readout.pooling!r}; its readout is {usual!r}")
        if reason := model.lacks(readout.heads) if readout.heads else "":
            raise EncodeError(reason)
        if readout.dimensions is not None and not 1 <= readout.dimensions <= model.dimensions:
            raise EncodeError(f"dimensions is {readout.dimensions}; this model takes 1 to {model.dimensions}")
        for i, ids in enumerate(sequences):
            _check_ids(ids, i, "token ids", model.vocab_size)
            if len(ids) > model.max_length:
                raise SequenceTooLong(i, len(ids), model.max_length)
        if type_ids is None:
            return
        if len(type_ids) != len(sequences):
            raise EncodeError(f"{len(type_ids)} type_ids for {len(sequences)} sequences; give one each")
        for i, (ids, kinds) in enumerate(zip(sequences, type_ids, strict=True)):
            _check_ids(kinds, i, "type_ids", max(model.type_vocab_size, 1))
            if len(kinds) != len(ids):
                raise EncodeError(f"input {i} has {len(ids)} tokens but {len(kinds)} type_ids")

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # each thread has an OpenMP setting of its own
        picked: list[tuple[_Call, int]] | None = []
        try:
            while (picked := self._next()) is not None:
                self._step(picked)
        except BaseException as error:  # a bug here must not leave callers waiting for ever
            log.exception("the encoder thread died")
            with self._changed:
                self._closed = error
            self._fail({call for call, _ in picked or []}, error)
        finally:
            self._fail_waiting()

    def _next(self) -> list[tuple[_Call, int]] | None:
        with self._changed:
            while self._closed is None:
                for call in [c for c in (*self._calls, *self._batch) if c.future.cancelled()]:
                    self._queue(call).remove(call)
                    self._stats.cancelled_calls += 1
                if self._calls or self._batch:
                    return self._pick()
                self._changed.wait()
        return None

    def _queue(self, call: _Call) -> deque[_Call]:
        return self._batch if call.batch else self._calls

    def _pick(self) -> list[tuple[_Call, int]]:
        """What the next step computes."""
        if not self._batch:
            return self._share_out(self._calls, self.token_budget)
        if not self._calls:
            near = time.monotonic() - self._seen < NEAR_S
            return self._share_out(self._batch, int(self.token_budget * (NEAR_PART if near else 1.0)))
        picked = self._share_out(self._calls, self.token_budget)
        earned = BATCH_SHARE * sum(len(call.sequences[i]) for call, i in picked)
        first = self._batch[0]
        length = len(first.sequences[first.waiting[0]])
        self._owed = min(self._owed + earned, max(self.token_budget, length))
        if length <= self._owed:
            riding = self._share_out(self._batch, int(self._owed))
            self._owed -= sum(len(call.sequences[i]) for call, i in riding)
            picked += riding
        return picked

    def _share_out(self, calls: deque[_Call], budget: int) -> list[tuple[_Call, int]]:
        """Round robin: each waiting call gives a quantum of tokens, then goes behind the others."""
        picked: list[tuple[_Call, int]] = []
        total = 0
        quantum = max(budget // len(calls), 1)
        while calls:
            call, taken = calls[0], 0
            while call.waiting and taken < quantum:
                length = len(call.sequences[call.waiting[0]])
                if picked and total + length > budget:
                    # It stays first in line, so the next step begins with it: nothing is overtaken for ever.
                    if taken:
                        calls.rotate(-1)
                    return picked
                index = call.waiting.popleft()
                call.tokens_waiting -= length
                taken += length
                total += length
                picked.append((call, index))
            calls.popleft()
            if call.waiting:
                calls.append(call)
        return picked

    def _step(self, picked: list[tuple[_Call, int]]) -> None:
        picked.sort(key=lambda p: len(p[0].sequences[p[1]]))
        batch = _build(picked)
        started = time.perf_counter()
        try:
            with self.clock:
                rows = self.model.forward(batch)
        except Exception as error:
            log.exception("an encoder batch of %d sequences failed", len(picked))
            self._fail({call for call, _ in picked}, error)
            return
        spent = time.perf_counter() - started
        with self._changed:
            stats = self._stats
            stats.batches += 1
            stats.sequences += len(picked)
            stats.tokens += len(batch.ids)
            stats.computed_tokens += self.model.padded_tokens(batch.lengths)
            stats.busy_s += spent
        for (call, index), row in zip(picked, rows, strict=True):
            if call.rows is None:
                count = len(call.sequences)
                call.rows = [row] * count if call.readout.heads else np.empty((count, len(row)), np.float32)
            call.rows[index] = row
            call.left -= 1
            if call.left:
                continue
            if call.future.set_running_or_notify_cancel():
                call.future.set_result(self._finish(call))
            else:
                with self._changed:
                    self._stats.cancelled_calls += 1

    def _finish(self, call: _Call) -> Any:
        if call.readout.heads:
            return call.readout.finish_long(call.rows, self.model.dimensions)
        return call.readout.finish(call.rows)

    def _fail(self, calls: set[_Call], cause: BaseException) -> None:
        with self._changed:
            self._calls = deque(c for c in self._calls if c not in calls)
            self._batch = deque(c for c in self._batch if c not in calls)
            self._stats.failed_calls += len(calls)
        for call in calls:
            error = EncodeFailed(f"the encoder's forward pass failed: {cause}")
            error.__cause__ = cause
            _set_exception(call.future, error)

    def _fail_waiting(self) -> None:
        with self._changed:
            calls = [*self._calls, *self._batch]
            self._calls, self._batch = deque(), deque()
            self._stats.failed_calls += len(calls)
        for call in calls:
            error = EncoderClosed("this encoder was shut down before the call was answered; send it again")
            error.__cause__ = self._closed
            _set_exception(call.future, error)


def _set_exception(future: Future[Rows], error: Exception) -> None:
    try:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    except InvalidStateError:  # answered already
        return


def _check_ids(ids: Ids, index: int, what: str, size: int) -> None:
    if ids.ndim != 1 or ids.dtype != np.int32 or not len(ids):
        got = f"{ids.dtype} {ids.shape}"
        raise EncodeError(f"{what} of input {index} must be a non-empty 1-D int32 array; got {got}")
    if ids.min() < 0 or ids.max() >= size:
        raise EncodeError(f"{what} of input {index} must lie in 0 to {size - 1}; is the tokenizer the model's?")


def _build(picked: list[tuple[_Call, int]]) -> EncodeBatch:
    sequences = [call.sequences[i] for call, i in picked]
    kinds = [
        np.zeros(len(call.sequences[i]), np.int32) if call.type_ids is None else call.type_ids[i] for call, i in picked
    ]
    return EncodeBatch(
        ids=np.concatenate(sequences),
        type_ids=np.concatenate(kinds),
        lengths=np.array([len(s) for s in sequences], np.int64),
        pooling=[call.readout.pooling for call, _ in picked],
        heads=[call.readout.heads for call, _ in picked] if any(call.readout.heads for call, _ in picked) else [],
    )
