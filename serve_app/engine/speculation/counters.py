"""What became of drafts, for statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from serve_app.engine.speculation.proposer import Proposal


@dataclass(slots=True)
class _OfProposer:
    asked: int = 0
    seconds: float = 0.0
    # Tokens that were verified, and those of them that stood.
    verified: int = 0
    accepted: int = 0


class Counters:
    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self._proposers: dict[str, _OfProposer] = {}

    def asked(self, source: str, seconds: float) -> None:
        known = self._proposers.setdefault(source, _OfProposer())
        known.asked += 1
        known.seconds += seconds

    def verified(self, proposal: Proposal, stood: int, verified: int) -> None:
        """Of the proposal's tokens ``verified`` were, and the first ``stood`` are what the target chose."""
        begin = 0
        for draft in proposal.drafts:
            known = self._proposers.setdefault(draft.source, _OfProposer())
            known.verified += max(0, min(verified - begin, len(draft.tokens)))
            known.accepted += max(0, min(stood - begin, verified - begin, len(draft.tokens)))
            begin += len(draft.tokens)
        if verified:
            self.lengths[verified] += 1

    def stats(self) -> dict[str, Any]:
        proposed = sum(p.verified for p in self._proposers.values())
        accepted = sum(p.accepted for p in self._proposers.values())
        drafted = sum(self.lengths.values())
        return {
            "proposed_tokens": proposed,
            "accepted_tokens": accepted,
            "acceptance_rate": accepted / proposed if proposed else 0.0,
            # Tokens that a request gets from a step with drafts, the one that is always right among them.
            "acceptance_length": 1 + accepted / drafted if drafted else 1.0,
            "proposers": {
                name: {
                    "asked": p.asked,
                    "ms": round(1e3 * p.seconds / p.asked, 4) if p.asked else 0.0,
                    "proposed_tokens": p.verified,
                    "accepted_tokens": p.accepted,
                    "acceptance_rate": round(p.accepted / p.verified, 4) if p.verified else 0.0,
                }
                for name, p in self._proposers.items()
            },
            "lengths": {str(n): c for n, c in sorted(self.lengths.items())},
        }
