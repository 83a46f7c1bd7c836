"""Drafts from a draft model, in this process or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serve_app.engine.request import Request
from serve_app.engine.speculation.proposer import Draft


@dataclass(slots=True)
class DraftQuery:
    """What a draft model needs to continue one sequence.

    ``agreed`` tokens from the last query still stand; ``suffix`` follows them. ``agreed == 0`` sends the whole
    sequence, and the digest of its adapter ("": none).
    """

    id: str
    agreed: int
    suffix: list[int]
    adapter: str = ""


class DraftTransport(Protocol):
    """Reaches a draft model, in this process or another. Returns None for sequences it does not know any more; raises
    if it can't be reached. ``over``: sequences asked about before that have ended.
    """

    def __call__(self, queries: list[DraftQuery], count: int, over: list[str]) -> dict[str, list[int] | None]: ...


class DraftProposer:
    """Asks a draft model, sending each sequence once and then only what was added or rejected since."""

    name = "draft"
    free = False
    continues = True

    def __init__(
        self, transport: DraftTransport, *, limit: int = 16, reachable: Callable[[], bool] = lambda: True
    ) -> None:
        self._most = limit
        self._transport = transport
        self._reachable = reachable
        self._sent: dict[str, list[int]] = {}
        # Told with the next question; where that gets lost, the draft model forgets what is idle when it needs room.
        self._over: list[str] = []

    @property
    def limit(self) -> int:
        return self._most if self._reachable() else 0

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        queries, known = [], {}
        for request in requests:
            sent = self._sent.get(request.id)
            tokens = known[request.id] = request.tokens + request.draft
            # What the draft model holds is what was sent and what it added itself; both may have been overruled.
            agreed = _common_prefix(sent, tokens) if sent is not None else 0
            adapter = "" if agreed else request.adapter_digest
            queries.append(DraftQuery(request.id, agreed, tokens[agreed:], adapter))
        over, self._over = self._over, []
        answers = self._transport(queries, count, over)
        proposals = {}
        for request in requests:
            draft = answers.get(request.id)
            if draft is None:
                self._sent.pop(request.id, None)
                continue
            self._sent[request.id] = known[request.id] + draft
            if draft:
                proposals[request.id] = Draft(list(draft))
        return proposals

    def forget(self, request_id: str) -> None:
        if self._sent.pop(request_id, None) is not None:
            self._over.append(request_id)


def _common_prefix(sent: list[int], tokens: list[int]) -> int:
    # Only the end can differ, so compare backwards from where both are certain to exist.
    limit = min(len(sent), len(tokens))
    low = max(0, limit - 64)
    for index in range(low, limit):
        if sent[index] != tokens[index]:
            return index
    return limit
