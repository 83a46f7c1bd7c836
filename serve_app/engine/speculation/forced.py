"""Drafts that a grammar forces: keys, punctuation and whatever else has no alternative need no model to be guessed."""

from __future__ import annotations

from serve_app.engine.request import Request
from serve_app.engine.speculation.proposer import Draft


class ForcedProposer:
    """Continues requests that have a constraint with the tokens it leaves no choice about.

    They are nearly always right: the text is certain, and only its division into tokens is the model's own.
    """

    name = "grammar"
    free = continues = True

    def __init__(self, *, limit: int = 16) -> None:
        self.limit = limit

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        drafts = {}
        for request in requests:
            if request.constraint is not None and (forced := request.constraint.forced(request.draft)[:count]):
                drafts[request.id] = Draft(forced)
        return drafts

    def forget(self, request_id: str) -> None:
        pass
