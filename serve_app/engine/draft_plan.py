"""How many draft tokens a step should verify, as arithmetic on chances and costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serve_app.engine.acceptance import Acceptance
from serve_app.engine.offer import Offer
from serve_app.engine.step_costs import StepCosts

# Chances below are not worth a row, whatever it costs.
FLOOR = 0.05
Chances = np.ndarray


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
    """The chance that each offered token stands, which it only can if those before it do; float64 [offers, longest], 0
    behind an offer's last token.
    """
    found = np.zeros((len(offers), max((o.tokens for o in offers), default=0)))
    for index, offer in enumerate(offers):
        begin = 0
        for segment in offer.segments:
            end = begin + len(segment.tokens)
            found[index, begin:end] = acceptance.chance(offer.request.id, segment.source, segment.grade)
            begin = end
    return np.multiply.accumulate(found, axis=1)


def ranked(chances: Chances) -> Chances:
    """Those worth a row, best first; [n]."""
    flat = chances[chances >= FLOOR]
    flat[::-1].sort()
    return flat


def best(
    ranking: Chances, batch: int, costs: StepCosts, *, margin: float, proposing: float = 0.0, doubt: float = 1.0
) -> Plan:
    """The number of drafts, taken from the best down, with which ``batch`` requests get most tokens per second; 0 if no
    number beats a plain step by ``margin``. ``doubt`` scales what drafts are believed to cost.
    """
    plain = costs.seconds(batch, np.zeros(1))[0]
    none = Plan(0, float(batch), plain + proposing)
    if not len(ranking):
        return none
    tokens = batch + np.add.accumulate(ranking)
    if tokens[-1] < margin * batch:
        return none
    seconds = plain + doubt * (costs.seconds(batch, np.arange(1.0, len(ranking) + 1)) - plain) + proposing
    rates = tokens / seconds
    at = int(rates.argmax())
    if rates[at] < margin * none.rate:
        return none
    return Plan(at + 1, float(tokens[at]), float(seconds[at]))


def kept(chances: Chances, drafts: int) -> list[int]:
    """How many tokens of each offer are among the best ``drafts``."""
    # Stable: an offer's own tokens stay in order even where chances are equal.
    order = np.argsort(-chances, axis=None, kind="stable")[:drafts]
    return np.bincount(order // chances.shape[1], minlength=len(chances)).tolist()
