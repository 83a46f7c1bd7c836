"""How many draft tokens a step should verify, as arithmetic on chances and costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serve_app.engine.speculation.acceptance import Acceptance
from serve_app.engine.speculation.offer import Offer
from serve_app.engine.speculation.step_costs import StepCosts

# Chances below are not worth a row, whatever it costs.
FLOOR = 0.05
# Of each offer: the chance that its first token stands, its first two, and so on, as far as they are worth a row.
Chances = list[list[float]]


@dataclass(slots=True)
class Plan:
    """A number of draft tokens for a step, and what the step is expected to yield and to take."""

    drafts: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def reach(offers: list[Offer], acceptance: Acceptance) -> Chances:
    """The chance that each offered token stands, which it only can if those before it do."""
    found: Chances = []
    for offer in offers:
        chances: list[float] = []
        reached = 1.0
        for segment in offer.segments:
            chance = acceptance.chance(offer.request.id, segment.source, segment.grade)
            for _ in segment.tokens:
                reached *= chance
                if reached < FLOOR:
                    break
                chances.append(reached)
        found.append(chances)
    return found


def ranked(chances: Chances) -> list[float]:
    """All of them, best first."""
    return sorted([c for of_offer in chances for c in of_offer], reverse=True)


def best(
    ranking: list[float], batch: int, costs: StepCosts, *, margin: float, proposing: float = 0.0, doubt: float = 1.0
) -> Plan:
    """The number of drafts, taken from the best down, with which ``batch`` requests get most tokens per second; 0 if no
    number beats a plain step by ``margin``. ``doubt`` scales what drafts are believed to cost.
    """
    plain = costs.plain(batch) or 0.0
    none = Plan(0, float(batch), plain + proposing)
    # Most often not even all of them for nothing would do.
    if sum(ranking) < (margin - 1) * batch:
        return none
    tokens = batch + np.add.accumulate(ranking)
    seconds = plain + doubt * (costs.seconds(batch, np.arange(1.0, len(ranking) + 1)) - plain) + proposing
    rates = tokens / seconds
    at = int(rates.argmax())
    if rates[at] < margin * none.rate:
        return none
    return Plan(at + 1, float(tokens[at]), float(seconds[at]))


def kept(chances: Chances, drafts: int) -> list[int]:
    """How many tokens of each offer are among the best ``drafts``."""
    order = sorted([(-chance, index) for index, of_offer in enumerate(chances) for chance in of_offer])
    found = [0] * len(chances)
    for _, index in order[:drafts]:
        found[index] += 1
    return found
