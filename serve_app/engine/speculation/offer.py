"""Who proposes draft tokens, and what proposers say about one request in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from serve_app.engine.request import Request


@dataclass(slots=True)
class Draft:
    """Proposed tokens. ``grade`` is the proposer's own scale of how sure it is (a longer match, a forced token); what a
    grade is worth is measured.
    """

    tokens: list[int]
    grade: int = 0


class Proposer(Protocol):
    """Proposes tokens to follow ``request.tokens + request.draft``.

    ``request.draft`` is what cheaper proposers have said already, mostly nothing. Requests about which there is nothing
    to say are left out. Proposals may be wrong, never harmful: the target verifies every token
    (:func:`serve_app.engine.scheduler.accept`).
    """

    # In statistics, and what acceptance is measured by.
    name: str
    # Answers within microseconds, so that it is asked at every step. Others are asked only where that pays.
    free: bool

    # Most tokens it should be asked for at once; 0: not at the moment.
    @property
    def limit(self) -> int: ...

    # Whether it can go on behind drafts of others; else it is asked only where ``request.draft`` is empty.
    continues: bool

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        """Up to ``count`` tokens per request id. May raise: it costs the proposal, not the step."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended, or what is known of it can't be trusted."""
        ...


@dataclass(slots=True)
class Segment:
    """``tokens`` of an offer by one proposer."""

    source: str
    grade: int
    tokens: list[int]


@dataclass(slots=True)
class Offer:
    """All that was proposed for ``request`` in one step, in order; at most ``room`` tokens."""

    request: Request
    room: int
    segments: list[Segment] = field(default_factory=list)
    # What a better proposer was asked instead of; whether it would have stood is still learned.
    dropped: list[Segment] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum([len(s.tokens) for s in self.segments]) if self.segments else 0

    def extend(self, source: str, grade: int, tokens: list[int]) -> None:
        tokens = tokens[: self.room - self.tokens]
        if tokens:
            self.segments.append(Segment(source, grade, tokens))
            self.request.draft += tokens

    def drop(self) -> None:
        """Makes room for somebody who is believed more."""
        self.dropped, self.segments = self.segments, []
        self.request.draft.clear()
