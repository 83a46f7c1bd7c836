"""Who proposes draft tokens, and what is proposed for one request in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from serve_app.engine.request import Request


@dataclass(slots=True)
class Draft:
    """Tokens that one proposer expects next. ``grade`` is the proposer's own scale of how sure it is (a longer match, a
    forced token); what a grade is worth is measured.
    """

    tokens: list[int]
    grade: int = 0
    # Its proposer's name, once it is part of a proposal.
    source: str = ""


class Proposer(Protocol):
    """Drafts tokens to follow ``request.tokens + request.draft``.

    ``request.draft`` is what cheaper proposers have drafted already, mostly nothing. Requests about which there is
    nothing to say are left out. Drafts may be wrong, never harmful: the target verifies every token
    (:func:`serve_app.engine.drafts.accept`).
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
        """A draft of up to ``count`` tokens per request id. May raise: it costs the draft, not the step."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended, or what is known of it can't be trusted."""
        ...


@dataclass(slots=True)
class Proposal:
    """The drafts for ``request`` in one step, each behind the one before; at most ``room`` tokens in all."""

    request: Request
    room: int
    drafts: list[Draft] = field(default_factory=list)
    # What a better proposer was asked instead of; whether it would have stood is still learned.
    replaced: list[Draft] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum([len(draft.tokens) for draft in self.drafts]) if self.drafts else 0

    def extend(self, source: str, grade: int, tokens: list[int]) -> None:
        tokens = tokens[: self.room - self.length]
        if tokens:
            self.drafts.append(Draft(tokens, grade, source))
            self.request.draft += tokens

    def clear(self) -> None:
        """Makes room for a better proposer."""
        self.replaced, self.drafts = self.drafts, []
        self.request.draft.clear()
