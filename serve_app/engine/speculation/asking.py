"""Whether a proposer that takes time is worth asking: for whom, for how many tokens, and instead of what."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.engine.speculation.acceptance import Acceptance
from serve_app.engine.speculation.draft_plan import FLOOR, Chances
from serve_app.engine.speculation.offer import Offer, Proposer

# Tokens that a proposer which takes time may be asked for.
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
# Drafts this unlikely to be reached are not continued by it.
REACH = 0.2
# Drafts whose next token is less likely to stand, by so much, are replaced by it.
TRUST = 0.1


@dataclass(slots=True)
class Candidates:
    """Offers that a proposer might extend: the chance of each of its tokens, and that its first one is reached."""

    offers: list[Offer] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    # Ids of the offers whose drafts it would replace.
    replaced: set[int] = field(default_factory=set)

    def added(self, count: int) -> list[float]:
        """The chances of up to ``count`` tokens for each, as far as they are worth a row."""
        found = []
        for chance, reached in zip(self.chance, self.reached, strict=True):
            for _ in range(count):
                reached *= chance
                if reached < FLOOR:
                    break
                found.append(reached)
        return found


def candidates(proposer: Proposer, offers: list[Offer], chances: Chances, acceptance: Acceptance) -> Candidates:
    """Those of ``offers`` it could help; ``chances``: :func:`serve_app.engine.speculation.draft_plan.reach`."""
    found = Candidates()
    for offer, before in zip(offers, chances, strict=True):
        chance = acceptance.chance(offer.request.id, proposer.name, 0)
        first, replaces = 1.0, False
        if offer.segments:
            if (before[0] if before else 0.0) + TRUST < chance:
                replaces = True
            elif proposer.continues and len(before) == offer.tokens < offer.room:
                first = before[-1]
            else:
                continue
        if offer.room and first * chance >= REACH:
            found.offers.append(offer)
            found.chance.append(chance)
            found.reached.append(first)
            if replaces:
                found.replaced.add(id(offer))
    return found


def counts(limit: int) -> list[int]:
    """Numbers of tokens to consider."""
    return sorted({*(c for c in COUNTS if c < limit), limit})
