"""Runs one step on the model: copies stored prefixes in, one forward pass over the flat batch, sampling on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serve_app.engine.constrain import Masking, Masks
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.kv_io.transfer import StoredPrefix, load_prefix
from serve_app.engine.penalties import SampleRow
from serve_app.engine.request import Request
from serve_app.engine.sampling import sample
from serve_app.engine.scores import take_scores
from serve_app.engine.step import Batch, Capture, Sampled, Scheduled, Step, build_batch

# (batch) -> logits [S, V] of batch.sample_rows
Forward = Callable[[Batch], Tensor]


class StepObserver(Protocol):
    """Wants to see what enters ``layers`` of the model at each step."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    def observe(self, scheduled: list[Scheduled], states: Tensor) -> None:
        """``states`` [T, len(layers), hidden] of the step's tokens, in the order of ``scheduled``."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        ...


@dataclass(slots=True)
class Computing:
    """A step whose pass has begun; ``logits`` waits for what it gives, once or more often."""

    step: Step
    batch: Batch
    masking: Masking | None
    logits: Callable[[], Tensor]


class Runner:
    """Runs steps; ``observer`` may be set by a feature that reads hidden states."""

    def __init__(self, forward: Forward, kv: KVCache) -> None:
        self.forward = forward
        self.kv = kv
        self.observer: StepObserver | None = None
        # Does a piece of work that speeds up later steps, if any is left; called while the engine is idle.
        self.prepare: Callable[[], bool] = lambda: False
        # The same in small portions, called between two steps.
        self.between_steps: Callable[[], None] = lambda: None
        # Set where requests may bring grammars.
        self.masks: Masks | None = None
        # Set where a pass can be begun before the one before has ended: gives what waits for its logits.
        self.submit: Callable[[Batch], Callable[[], Tensor]] | None = None

    def run(self, step: Step) -> list[Sampled]:
        """Computes ``step``; one :class:`Sampled` per scheduled request, empty where no row was to be sampled."""
        return self.finish(self.begin(step))

    @torch.inference_mode()
    def begin(self, step: Step) -> Computing:
        """Starts on ``step``. Those that have begun are finished in the same order."""
        self.load(step)
        batch = build_batch(step.scheduled, self.kv)
        if self.observer is not None:
            batch.capture = Capture(self.observer.layers)
        masking = self.masks.begin(step.scheduled) if self.masks is not None else None
        if self.submit is not None:
            return Computing(step, batch, masking, self.submit(batch))
        logits = self.forward(batch)
        return Computing(step, batch, masking, lambda: logits)

    @torch.inference_mode()
    def finish(self, computing: Computing, gone: Collection[int] = ()) -> list[Sampled]:
        """As :meth:`run`. ``gone``: indices of scheduled requests that do not want their tokens any more."""
        step, batch = computing.step, computing.batch
        logits = computing.logits()
        if self.observer is not None and batch.capture is not None and batch.capture.states is not None:
            self.observer.observe(*_of_those_left(step.scheduled, batch.capture.states, gone))
        if not step.scores:
            return self._sample(step, logits, computing.masking, gone)
        scores, logits = take_scores(step.scheduled, logits)
        results = self._sample(step, logits, computing.masking, gone)
        for result, found in zip(results, scores, strict=True):
            result.scores = found
        return results

    def _sample(self, step: Step, logits: Tensor, masking: Masking | None, gone: Collection[int]) -> list[Sampled]:
        """Draws from ``logits`` [S, V] of the rows to sample; see :meth:`finish`."""
        rows = [row for item in step.scheduled for row in sample_rows(item, logits.shape[1])]
        if not rows:
            return [Sampled([]) for _ in step.scheduled]
        token_ids, logprobs = sample(logits, rows, masking.mask() if masking is not None else None)
        results, at = [], 0
        for item in step.scheduled:
            chosen = slice(at, at + item.samples)
            kept = [p for p in logprobs[chosen] if p is not None]
            results.append(Sampled(token_ids[chosen], kept if item.request.sampling.logprobs is not None else None))
            at += item.samples
        if masking is not None:
            masking.settle(results, gone)
        return results

    def load(self, step: Step) -> None:
        """Copies blocks that others have computed, and the stored prefixes of ``step`` into their blocks."""
        if step.copies:
            self.kv.copy_within([c.source for c in step.copies], [c.target for c in step.copies])
        for load in step.loads:
            assert isinstance(load.prefix, StoredPrefix)
            load_prefix(self.kv, load.request.blocks, load.prefix, load.start, load.end)
            if load.prefix.state is not None:
                self.kv.state_in(load.request.state, load.prefix.state)


def _of_those_left(scheduled: list[Scheduled], states: Tensor, gone: Collection[int]) -> tuple[list[Scheduled], Tensor]:
    """Without requests that have ended since, whose blocks may be others' now."""
    if not gone:
        return scheduled, states
    parts = states.split([item.count for item in scheduled])
    left = [index for index in range(len(scheduled)) if index not in gone]
    return [scheduled[index] for index in left], torch.cat([states[:0], *(parts[index] for index in left)])


def sample_rows(item: Scheduled, vocab: int) -> list[SampleRow]:
    """One row per token to draw: the next one, and one behind each draft, which then counts as output. A row has
    ``vocab`` logits; a token that stands for a picture may have none (Llama 3.2 Vision).
    """
    request: Request = item.request
    params = request.sampling
    rows = []
    for j in range(item.samples):
        early = request.early is not None and request.output_len + j < params.min_tokens
        row = SampleRow(request.early if early else params, len(request.tokens) + j)  # type: ignore[arg-type]
        if request.rules is not None:
            row.params = request.rules.on_row(row.params, request.tokens + request.draft[:j], request.prompt_len)
        if request.asked and not request.output_len:
            row.asked = request.asked
        if params.has_penalties:
            row.prompt = request.tokens[: request.prompt_len]
            if request.embedded:
                row.prompt = [token for token in row.prompt if token < vocab]
            row.output = request.tokens[request.prompt_len :] + request.draft[:j]
        rows.append(row)
    return rows
