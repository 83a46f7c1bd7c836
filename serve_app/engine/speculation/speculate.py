"""Speculative decoding's seam: who drafts tokens, and what becomes of them in a step.

::

    proposers, cheapest first     n-gram ──> recent ──> draft model     each continues what stands before it
    controller                    whom to ask, and how many of the drafts a step of that many rows repays
    drafts.accept                 the target's own choice decides; drafts change when tokens come, never which

Each proposer and each controller is one file, named by nobody but :mod:`serve_app.worker.loading`, which plugs it in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from serve_app.engine.constrain import allowed_draft
from serve_app.engine.drafts import accept
from serve_app.engine.request import Request
from serve_app.engine.speculation.counters import Counters
from serve_app.engine.speculation.proposer import Proposal, Proposer
from serve_app.engine.step import Scheduled, Step

log = logging.getLogger(__name__)


class Controller(Protocol):
    """Decides how many tokens are drafted and verified; methods in the order of a step's calls."""

    # Per request and step.
    max_tokens: int

    def plain_steps(self, batch: int) -> int:
        """How many steps of ``batch`` generating requests, from this one on, should not look for drafts."""
        ...

    def ran_plain(self, batch: int, steps: int, seconds: float) -> None:
        """``steps`` that did not look for drafts took ``seconds`` together."""
        ...

    def ask(self, proposer: Proposer, proposals: list[Proposal]) -> tuple[list[Proposal], int]:
        """The proposals that a proposer should extend, and by how many tokens at most."""
        ...

    def asked(self, source: str, proposals: list[Proposal], count: int, seconds: float) -> None:
        """A proposer drafted ``count`` tokens, which took ``seconds``."""
        ...

    def verify(self, proposals: list[Proposal]) -> list[int]:
        """How many tokens of each proposal to verify."""
        ...

    def learn(self, proposal: Proposal, new: list[int]) -> None:
        """``new`` are the tokens that came."""
        ...

    def record(self, batch: int, rows: int, gained: int, seconds: float, looking: float) -> None:
        """A step in which every request generated: ``rows`` computed, ``gained`` tokens, its time without and that of
        looking for drafts.
        """
        ...

    def disturbed(self, looking: float) -> None:
        """A step whose own time says nothing took so long for looking for drafts."""
        ...

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        ...

    def stats(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class _Drafted:
    """What a step that looks for drafts was given, to be compared with what it makes of it."""

    proposals: list[Proposal]
    known: list[int]
    # Every running request generates: the step's time says something about steps like it.
    pure: bool
    # Seconds of looking, and when that was done.
    looking: float
    done: float


@dataclass(slots=True)
class _PlainRun:
    """Steps in a row that do not look, for ``batch`` running requests that all generate."""

    batch: int
    left: int
    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Looked:
    """What is kept of a step's beginning for its end, where others begin in between."""

    drafted: _Drafted | None
    plain: _PlainRun | None


class Speculation:
    """Proposers and their controller: everything the engine plugs in, or leaves out. ``clock`` gives seconds."""

    def __init__(
        self,
        proposers: Proposer | Sequence[Proposer],
        controller: Controller,
        *,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposers = list(proposers) if isinstance(proposers, Sequence) else [proposers]
        self.controller = controller
        self.counters = Counters()
        self._vocab_size = vocab_size
        self._clock = clock
        self._drafted: _Drafted | None = None
        self._plain_run: _PlainRun | None = None
        self._failing: set[str] = set()

    def before_step(self, running: list[Request], max_model_len: int) -> None:
        """Puts drafts on the requests that only wait for their next token, if this step looks for any."""
        self._drafted = None
        if self._still_plain(running):
            return
        started = self._clock()
        ready = [r for r in running if len(r.tokens) - r.computed == 1 and not r.prefill_only]
        if not ready or self._begin_plain(len(ready), len(running)):
            return
        proposals = [Proposal(r, self._room(r, max_model_len)) for r in ready]
        known = [len(r.tokens) for r in ready]
        for proposer in self.proposers:
            members, count = self.controller.ask(proposer, proposals)
            if members and count:
                self._propose(proposer, members, count)
        for proposal, kept in zip(proposals, self.controller.verify(proposals), strict=True):
            if proposal.drafts:
                del proposal.request.draft[kept:]
        done = self._clock()
        self._drafted = _Drafted(proposals, known, len(ready) == len(running), done - started, done)

    def runs_plain(self, running: list[Request]) -> bool:
        """Whether a step that begins now would not look for drafts, so that it may be run without asking."""
        return not running or self._still_plain(running) or self._begin_plain(len(running), len(running))

    def set_aside(self) -> Looked:
        """What :meth:`after_step` is given of the step that begins now, where others begin before it is done."""
        looked, self._drafted = Looked(self._drafted, self._plain_run), None
        return looked

    def after_step(self, step: Step, started: float, looked: Looked | None = None) -> None:
        """Compares what was drafted with what the target chose, and what the step took with what it yielded.

        A step that began at ``started`` and did not look teaches what a plain one takes. ``looked``: at its beginning,
        where that is not what :meth:`before_step` did last.
        """
        now = self._clock()
        if looked is None:
            looked = self.set_aside()
        elif looked.drafted is not None:  # the step before it may have been done later
            looked.drafted.done = max(looked.drafted.done, started)
        drafted, own = looked.drafted, step.own
        if drafted is None:
            self._after_plain(looked.plain, own, now - started)
            return
        verified = {id(s.request): s.samples - 1 for s in own if s.samples}
        # Nobody was preempted, or left out because there was no room.
        pure = drafted.pure and len(verified) == len(own) == len(drafted.proposals)
        gained = 0
        for proposal, before in zip(drafted.proposals, drafted.known, strict=True):
            gained += len(proposal.request.tokens) - before
            count = verified.get(id(proposal.request))
            if (proposal.drafts or proposal.replaced) and count is not None:
                new = proposal.request.tokens[before:]
                self.controller.learn(proposal, new)
                self.counters.verified(proposal, accept([t for d in proposal.drafts for t in d.tokens], new), count)
        seconds, looking = now - drafted.done, drafted.looking + self._clock() - now
        if pure:
            rows = sum([s.count for s in own])
            self.controller.record(len(drafted.proposals), rows, gained, seconds, looking)
        else:
            self.controller.disturbed(looking)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.controller.forget(request_id)
        for proposer in self.proposers:
            proposer.forget(request_id)

    def stats(self) -> dict[str, Any]:
        """What became of drafts, and what the controller knows."""
        return self.counters.stats() | self.controller.stats()

    def _still_plain(self, running: list[Request]) -> bool:
        run = self._plain_run
        if run is None:
            return False
        if run.left > 0 and run.batch == len(running):
            return True
        self._plain_run = None
        if run.steps:
            self.controller.ran_plain(run.batch, run.steps, run.seconds)
        return False

    def _after_plain(self, run: _PlainRun | None, own: Sequence[Scheduled], seconds: float) -> None:
        if run is None:
            return
        run.left -= 1
        if len(own) != run.batch or not all([s.count == s.samples == 1 for s in own]):
            return
        if run is self._plain_run:
            run.steps += 1
            run.seconds += seconds
        else:  # it has ended since
            self.controller.ran_plain(run.batch, 1, seconds)

    def _begin_plain(self, batch: int, running: int) -> bool:
        """Whether this step and perhaps some more are plain ones."""
        steps = self.controller.plain_steps(batch)
        if steps:
            self._plain_run = _PlainRun(running, steps if batch == running else 1)
        return steps > 0

    def _propose(self, proposer: Proposer, members: list[Proposal], count: int) -> None:
        """Asks, and notes what was drafted. A proposer that fails costs its draft, not the step."""
        started = self._clock()
        try:
            drafts = proposer.propose([p.request for p in members], count)
        except Exception as error:
            if proposer.name not in self._failing:
                log.warning("no drafts of %s for now: %s: %s", proposer.name, type(error).__name__, error)
            self._failing.add(proposer.name)
            # What it still holds is unknown. How long it took to fail says nothing about what asking takes.
            for proposal in members:
                proposer.forget(proposal.request.id)
            return
        self._failing.discard(proposer.name)
        for proposal in members:
            draft = drafts.get(proposal.request.id)
            if draft is not None:
                proposal.extend(proposer.name, draft.grade, self._usable(proposal.request, draft.tokens[:count]))
        seconds = self._clock() - started
        self.counters.asked(proposer.name, seconds)
        self.controller.asked(proposer.name, members, count, seconds)

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
