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
from dataclasses import dataclass, field
from itertools import takewhile

from serve_app.engine.constrain import allowed_draft
from serve_app.engine.controller import SpeculationController
from serve_app.engine.draft_proposer import DraftProposer, DraftQuery, DraftTransport
from serve_app.engine.offer import Draft, Offer, Proposer
from serve_app.engine.request import Request
from serve_app.engine.scheduler import Step

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
class _Pending:
    """What a step was given, to be compared with what it makes of it."""

    offers: list[Offer] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    # Every running request generates: the step's time says something about steps like it.
    pure: bool = False
    proposing: float = 0.0
    started: float = 0.0


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
        self._pending = _Pending()
        self._failing: set[str] = set()

    def before_step(self, running: list[Request], max_model_len: int) -> None:
        """Puts drafts on the requests that only wait for their next token."""
        ready = [r for r in running if r.pending == 1 and not r.prefill_only]
        offers = [Offer(r, self._room(r, max_model_len)) for r in ready]
        pending = _Pending(offers, [len(r.tokens) for r in ready], len(ready) == len(running))
        self.controller.begin(len(ready))
        for proposer in self.proposers if ready else ():
            members, count = self.controller.ask(proposer, offers)
            if members:
                seconds = self._propose(proposer, members, count)
                pending.proposing += 0.0 if proposer.free else seconds
        for offer, kept in zip(offers, self.controller.take(offers), strict=True):
            del offer.request.draft[kept:]
        pending.started = time.perf_counter()
        self._pending = pending

    def steps_aside(self, running: list[Request]) -> bool:
        """Whether the next step would have no drafts anyway, so that it may be run without asking."""
        return self.controller.steps_aside(len(running))

    def after_step(self, step: Step, started: float) -> None:
        """Compares what was offered with what the target chose, and what the step took with what it yielded.

        A step that began at ``started`` without :meth:`before_step` teaches what a plain one takes.
        """
        pending, self._pending = self._pending, _Pending()
        if not pending.started:
            plain = all(s.count == s.samples == 1 for s in step.scheduled)
            self.controller.stepped_aside(len(step.scheduled) if plain else 0, time.perf_counter() - started)
            return
        seconds = time.perf_counter() - pending.started
        verified = {id(s.request): s.samples - 1 for s in step.scheduled if s.samples}
        gained = 0
        for offer, before in zip(pending.offers, pending.known, strict=True):
            count = verified.get(id(offer.request))
            if count is None:  # preempted, or there was no room for it
                pending.pure = False
                continue
            new = offer.request.tokens[before:]
            gained += len(new)
            self.controller.learn(offer, new, count)
        if pending.pure and pending.offers and len(step.scheduled) == len(pending.offers):
            rows = sum(s.count for s in step.scheduled)
            self.controller.record(len(pending.offers), rows, gained, seconds, pending.proposing)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.controller.forget(request_id)
        for proposer in self.proposers:
            proposer.forget(request_id)

    def _propose(self, proposer: Proposer, members: list[Offer], count: int) -> float:
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
            return time.perf_counter() - started
        self._failing.discard(proposer.name)
        for offer in members:
            draft = drafts.get(offer.request.id)
            if draft is not None:
                offer.extend(proposer.name, draft.grade, self._usable(offer.request, draft.tokens[:count]))
        seconds = time.perf_counter() - started
        self.controller.asked(proposer.name, members, count, seconds)
        return seconds

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
