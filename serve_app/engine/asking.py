"""Whether a proposer that takes time is worth asking: for whom, for how many tokens, and instead of what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serve_app.engine.acceptance import Acceptance
from serve_app.engine.draft_plan import Chances
from serve_app.engine.offer import Offer, Proposer

# Tokens that a proposer which takes time may be asked for.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
# Drafts this unlikely to be reached are not continued by it.
REACH = 0.2
# Drafts whose next token is less likely to stand, by so much, are replaced by it.
TRUST = 0.1


@dataclass(slots=True)
class Candidates:
    """Offers that a proposer might extend: the chance of each of its tokens, and that its first one is reached."""

    offers: list[Offer]
    chance: np.ndarray
    reached: np.ndarray
    # Ids of the offers whose drafts it would replace.
    replaced: set[int]

    def added(self, count: int) -> np.ndarray:
        """The chances of ``count`` tokens for each; flat."""
        return (self.reached[:, None] * self.chance[:, None] ** np.arange(1, count + 1)).ravel()


def candidates(proposer: Proposer, offers: list[Offer], chances: Chances, acceptance: Acceptance) -> Candidates:
    """Those of ``offers`` (with their ``chances``, see :func:`serve_app.engine.draft_plan.reach`) it could help."""
    found = Candidates([], np.empty(0), np.empty(0), set())
    own, reached = [], []
    for offer, before in zip(offers, chances, strict=True):
        chance = acceptance.chance(offer.request.id, proposer.name, 0)
        first = 1.0
        if offer.segments:
            if before[0] + TRUST < chance:
                found.replaced.add(id(offer))
            elif proposer.continues and offer.room > offer.tokens:
                first = before[offer.tokens - 1]
            else:
                continue
        if offer.room and first * chance >= REACH:
            found.offers.append(offer)
            own.append(chance)
            reached.append(first)
        else:
            found.replaced.discard(id(offer))
    found.chance, found.reached = np.array(own), np.array(reached)
    return found


def counts(limit: int) -> list[int]:
    """Numbers of tokens to consider."""
    return sorted({*(c for c in COUNTS if c < limit), limit})
