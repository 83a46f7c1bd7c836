"""Speculative decoding's seam: who proposes draft tokens, and how many are worth it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from serve_app.engine.constrain import allowed_draft
from serve_app.engine.request import Request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftQuery:
    """What a draft model needs to continue one sequence.

    ``agreed`` tokens from the last query still stand; ``suffix`` follows them. ``agreed == 0`` sends the whole
    sequence.
    """

    id: str
    agreed: int
    suffix: list[int]


class Proposer(Protocol):
    """Proposes up to ``count`` tokens to follow each request; requests it has nothing to say about are left out.

    Proposals may be wrong, never harmful: the target verifies every token (:func:`serve_app.engine.scheduler.accept`).
    """

    def propose(self, requests: list[Request], count: int) -> dict[str, list[int]]: ...

    def forget(self, request_id: str) -> None: ...


class DraftTransport(Protocol):
    """Reaches a draft model, in this process or another. Returns None for sequences it does not know any more."""

    def __call__(self, queries: list[DraftQuery], count: int) -> dict[str, list[int] | None]: ...


class DraftProposer:
    """Asks a draft model, sending each sequence once and then only what was added or rejected since."""

    def __init__(self, transport: DraftTransport) -> None:
        self._transport = transport
        self._sent: dict[str, list[int]] = {}

    def propose(self, requests: list[Request], count: int) -> dict[str, list[int]]:
        queries = []
        for request in requests:
            sent = self._sent.get(request.id)
            # What the draft model holds is what was sent and what it added itself; both may have been overruled.
            agreed = _common_prefix(sent, request.tokens) if sent is not None else 0
            queries.append(DraftQuery(request.id, agreed, request.tokens[agreed:]))
        answers = self._transport(queries, count)
        proposals = {}
        for request in requests:
            draft = answers.get(request.id)
            if draft is None:
                self._sent.pop(request.id, None)
                continue
            self._sent[request.id] = request.tokens + draft
            if draft:
                proposals[request.id] = list(draft)
        return proposals

    def forget(self, request_id: str) -> None:
        self._sent.pop(request_id, None)


def _common_prefix(sent: list[int], tokens: list[int]) -> int:
    # Only the end can differ, so compare backwards from where both are certain to exist.
    limit = min(len(sent), len(tokens))
    low = max(0, limit - 64)
    for index in range(low, limit):
        if sent[index] != tokens[index]:
            return index
    return limit


@dataclass(slots=True)
class _Average:
    """Exponential moving average that starts as a plain mean."""

    value: float = 0.0
    samples: int = 0

    def add(self, sample: float, weight: float = 0.1) -> None:
        self.samples += 1
        self.value += max(weight, 1 / self.samples) * (sample - self.value)


@dataclass(slots=True)
class _Measured:
    """What is known about one batch size: step seconds without and with drafts, tokens per drafted step and request."""

    plain: _Average = field(default_factory=_Average)
    drafted: _Average = field(default_factory=_Average)
    gain: _Average = field(default_factory=_Average)
    since_probe: int = 0


class SpeculationController:
    """Decides from measured acceptance and step times whether drafts pay at the current batch size.

    A drafted step costs a proposal and a verification and yields ``1 + accepted`` tokens per request; it is compared in
    tokens per second with a plain step, separately for each power-of-two batch size. The loser of the comparison is
    measured again now and then, since acceptance depends on the text.
    """

    MIN_SAMPLES = 8
    PROBE_EVERY = 256

    def __init__(self, max_tokens: int, *, always: bool = False) -> None:
        self.max_tokens = max_tokens
        self.always = always
        self.proposed = 0
        self.accepted = 0
        self.steps = 0
        self.drafted_steps = 0
        self._measured: dict[int, _Measured] = {}

    def choose(self, batch_size: int) -> int:
        """Draft tokens per request for the next step of ``batch_size`` generating requests."""
        if self.always or self.max_tokens == 0:
            return self.max_tokens
        known = self._measured.setdefault(batch_size.bit_length(), _Measured())
        if known.drafted.samples < self.MIN_SAMPLES:
            return self.max_tokens
        if known.plain.samples < self.MIN_SAMPLES:
            return 0
        worthwhile = known.gain.value * known.plain.value > known.drafted.value
        known.since_probe = (known.since_probe + 1) % (self.PROBE_EVERY + self.MIN_SAMPLES)
        if known.since_probe >= self.PROBE_EVERY:
            worthwhile = not worthwhile
        return self.max_tokens if worthwhile else 0

    def record(self, batch_size: int, proposed: int, accepted: int, seconds: float) -> None:
        """One step in which every request generated: drafts proposed and accepted in total, and its duration."""
        known = self._measured.setdefault(batch_size.bit_length(), _Measured())
        self.steps += 1
        if proposed:
            self.drafted_steps += 1
            self.proposed += proposed
            self.accepted += accepted
            known.drafted.add(seconds)
            known.gain.add(1.0 + accepted / batch_size)
        else:
            known.plain.add(seconds)

    def stats(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
            "acceptance_rate": self.accepted / self.proposed if self.proposed else 0.0,
        }


class Speculation:
    """A proposer and its controller: everything the engine plugs in, or leaves out."""

    def __init__(self, proposer: Proposer, controller: SpeculationController, *, vocab_size: int | None = None) -> None:
        self.proposer = proposer
        self.controller = controller
        self._vocab_size = vocab_size
        self._started = 0.0
        self._size = 0
        self._proposed = 0
        self._failing = False

    def before_step(self, running: list[Request], max_model_len: int) -> None:
        """Puts drafts on the requests that only wait for their next token."""
        self._started = time.perf_counter()
        ready = [r for r in running if r.pending == 1 and not r.prefill_only]
        self._size, self._proposed = (len(ready), 0) if len(ready) == len(running) else (0, 0)
        count = self.controller.choose(len(ready)) if ready else 0
        if count == 0:
            return
        for request_id, draft in self._propose(ready, count).items():
            request = next(r for r in ready if r.id == request_id)
            room = min(request.sampling.max_tokens - request.output_len, max_model_len - len(request.tokens)) - 1
            request.draft = allowed_draft(request, self._known(draft[: max(0, room)]))
            self._proposed += len(request.draft)

    def _known(self, draft: list[int]) -> list[int]:
        """Up to the first token that the target does not have: a draft model may pad its vocabulary further."""
        size = self._vocab_size
        return draft if size is None else list(takewhile(lambda token: 0 <= token < size, draft))

    def _propose(self, ready: list[Request], count: int) -> dict[str, list[int]]:
        """A proposer that fails costs its proposal, not the step."""
        try:
            proposals = self.proposer.propose(ready, count)
        except Exception as error:
            if not self._failing:
                log.warning("decoding goes on without drafts for now: %s: %s", type(error).__name__, error)
            self._failing = True
            # What the draft model still holds is unknown.
            for request in ready:
                self.proposer.forget(request.id)
            return {}
        self._failing = False
        return proposals

    def after_step(self, accepted: int) -> None:
        if self._size:
            self.controller.record(self._size, self._proposed, accepted, time.perf_counter() - self._started)
