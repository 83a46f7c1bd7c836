"""Speculative decoding's seam: who proposes draft tokens, and what becomes of them in a step.

::

    proposers, cheapest first     n-gram ──> recent ──> draft model     each continues what stands before it
    controller                    whom to ask, and how many of the drafts a step of that many rows repays
    scheduler.accept              the target's own choice decides; drafts change when tokens come, never which
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from serve_app.engine.constrain import allowed_draft
from serve_app.engine.request import Request
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.draft_proposer import DraftProposer, DraftQuery, DraftTransport
from serve_app.engine.speculation.offer import Draft, Offer, Proposer
from serve_app.engine.step import Step

__all__ = [
    "Draft",
    "DraftProposer",
    "DraftQuery",
    "DraftTransport",
    "Proposer",
    "Speculation",
    "SpeculationController",
]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Looked:
    """What a step that looks for drafts was given, to be compared with what it makes of it."""

    offers: list[Offer]
    known: list[int]
    # Every running request generates: the step's time says something about steps like it.
    pure: bool
    # Seconds of looking, and when that was done.
    looking: float
    done: float


@dataclass(slots=True)
class _Aside:
    """Steps in a row that do not look, for ``batch`` running requests that all generate."""

    batch: int
    left: int
    steps: int = 0
    seconds: float = 0.0


class Speculation:
    """Proposers and their controller: everything the engine plugs in, or leaves out."""

    def __init__(
        self,
        proposers: Proposer | Sequence[Proposer],
        controller: SpeculationController,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.proposers = list(proposers) if isinstance(proposers, Sequence) else [proposers]
        self.controller = controller
        self._vocab_size = vocab_size
        self._looked: _Looked | None = None
        self._aside: _Aside | None = None
        self._failing: set[str] = set()

    def before_step(self, running: list[Request], max_model_len: int) -> None:
        """Puts drafts on the requests that only wait for their next token, if this step looks for any."""
        self._looked = None
        if self._still_aside(running):
            return
        started = time.perf_counter()
        ready = [r for r in running if len(r.tokens) - r.computed == 1 and not r.prefill_only]
        if not ready or self._begin(len(ready), len(running)):
            return
        offers = [Offer(r, self._room(r, max_model_len)) for r in ready]
        known = [len(r.tokens) for r in ready]
        for proposer in self.proposers:
            members, count = self.controller.ask(proposer, offers)
            if members:
                self._propose(proposer, members, count)
        for offer, kept in zip(offers, self.controller.take(offers), strict=True):
            if offer.segments:
                del offer.request.draft[kept:]
        done = time.perf_counter()
        self._looked = _Looked(offers, known, len(ready) == len(running), done - started, done)

    def steps_aside(self, running: list[Request]) -> bool:
        """Whether a step that begins now would not look for drafts, so that it may be run without asking."""
        return not running or self._still_aside(running) or self._begin(len(running), len(running))

    def after_step(self, step: Step, started: float) -> None:
        """Compares what was offered with what the target chose, and what the step took with what it yielded.

        A step that began at ``started`` and did not look teaches what a plain one takes.
        """
        now = time.perf_counter()
        looked, self._looked = self._looked, None
        if looked is None:
            aside = self._aside
            if aside is not None:
                aside.left -= 1
                if len(step.scheduled) == aside.batch and all([s.count == s.samples == 1 for s in step.scheduled]):
                    aside.steps += 1
                    aside.seconds += now - started
            return
        verified = {id(s.request): s.samples - 1 for s in step.scheduled if s.samples}
        # Nobody was preempted, or left out because there was no room.
        pure = looked.pure and len(verified) == len(step.scheduled) == len(looked.offers)
        gained = 0
        for offer, before in zip(looked.offers, looked.known, strict=True):
            gained += len(offer.request.tokens) - before
            if (offer.segments or offer.dropped) and (count := verified.get(id(offer.request))) is not None:
                self.controller.learn(offer, offer.request.tokens[before:], count)
        seconds, looking = now - looked.done, looked.looking + time.perf_counter() - now
        if pure:
            rows = sum([s.count for s in step.scheduled])
            self.controller.record(len(looked.offers), rows, gained, seconds, looking)
        else:
            self.controller.disturbed(looking)

    def _still_aside(self, running: list[Request]) -> bool:
        aside = self._aside
        if aside is None:
            return False
        if aside.left > 0 and aside.batch == len(running):
            return True
        self._aside = None
        if aside.steps:
            self.controller.stepped_aside(aside.batch, aside.steps, aside.seconds)
        return False

    def _begin(self, batch: int, running: int) -> bool:
        """Whether this step and perhaps some more stand aside."""
        pause = self.controller.begin(batch)
        if pause:
            self._aside = _Aside(running, pause if batch == running else 1)
        return pause > 0

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.controller.forget(request_id)
        for proposer in self.proposers:
            proposer.forget(request_id)

    def _propose(self, proposer: Proposer, members: list[Offer], count: int) -> None:
        """Asks, and notes what was said. A proposer that fails costs its proposal, not the step."""
        started = time.perf_counter()
        try:
            drafts = proposer.propose([o.request for o in members], count)
        except Exception as error:
            if proposer.name not in self._failing:
                log.warning("no drafts of %s for now: %s: %s", proposer.name, type(error).__name__, error)
            self._failing.add(proposer.name)
            # What it still holds is unknown. How long it took to fail says nothing about what asking takes.
            for offer in members:
                proposer.forget(offer.request.id)
            return
        self._failing.discard(proposer.name)
        for offer in members:
            draft = drafts.get(offer.request.id)
            if draft is not None:
                offer.extend(proposer.name, draft.grade, self._usable(offer.request, draft.tokens[:count]))
        self.controller.asked(proposer.name, members, count, time.perf_counter() - started)

    def _usable(self, request: Request, tokens: list[int]) -> list[int]:
        """``tokens`` up to the first that the target could not draw."""
        tokens = self._known(tokens)
        if request.constraint is None:
            return tokens
        return allowed_draft(request, request.draft + tokens)[len(request.draft) :]

    def _known(self, tokens: list[int]) -> list[int]:
        """Up to the first token that the target does not have: a draft model may pad its vocabulary further."""
        size = self._vocab_size
        if size is None or not tokens or (min(tokens) >= 0 and max(tokens) < size):
            return tokens
        return list(takewhile(lambda token: 0 <= token < size, tokens))

    def _room(self, request: Request, max_model_len: int) -> int:
        """Drafts that can still count: the token behind the last of them must fit as well."""
        left = min(request.sampling.max_tokens - request.output_len, max_model_len - len(request.tokens))
        return max(0, min(left - 1, self.controller.max_tokens))
