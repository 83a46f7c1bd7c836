"""How likely a draft token is to stand, learned from what the target chose."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Where nothing is known yet: worth trying, soon overruled by what happens.
PRIOR, PRIOR_WEIGHT = 0.7, 4.0


@dataclass(slots=True)
class _Rate:
    """Share of drafts that stood, over about the last ``WINDOW``; fades back to the prior while nothing happens, so
    that a proposer that was written off gets another chance.
    """

    WINDOW = 200.0
    FADE = 0.999

    accepted: float = PRIOR * PRIOR_WEIGHT
    tried: float = PRIOR_WEIGHT
    at: int = 0

    def add(self, accepted: int, tried: int, now: int) -> None:
        if now != self.at:
            fade = self.FADE ** (now - self.at)
            self.accepted = self.accepted * fade + PRIOR * PRIOR_WEIGHT * (1 - fade)
            self.tried = self.tried * fade + PRIOR_WEIGHT * (1 - fade)
            self.at = now
        self.accepted += accepted
        self.tried += tried
        if self.tried > self.WINDOW:
            self.accepted *= self.WINDOW / self.tried
            self.tried = self.WINDOW

    def mean(self, now: int) -> float:
        if now == self.at:
            return self.accepted / self.tried
        fade = self.FADE ** (now - self.at)
        prior = PRIOR_WEIGHT * (1 - fade)
        return (self.accepted * fade + PRIOR * prior) / (self.tried * fade + prior)


@dataclass(slots=True)
class _Own:
    """How one request differs from the others: what stood, and what was to be expected from the grades."""

    WINDOW = 12.0
    FADE = 0.97
    WEIGHT = 1.5

    accepted: float = 0.0
    expected: float = 0.0
    tried: float = 0.0
    at: int = 0
    # Difference in log odds, before fading; None: not worked out since the last trial.
    shift: float | None = 0.0

    def add(self, accepted: int, tried: int, expected: float, now: int) -> None:
        keep = self.FADE ** (now - self.at) * min(1.0, self.WINDOW / (self.tried + tried))
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected
        self.tried = self.tried * keep + tried
        self.at = now
        self.shift = None

    def shift_now(self, now: int) -> float:
        """Difference in log odds."""
        if self.shift is None:
            mean = self.expected / self.tried
            self.shift = _logit((self.accepted + self.WEIGHT * mean) / (self.tried + self.WEIGHT)) - _logit(mean)
        return self.shift if now == self.at else self.shift * self.FADE ** (now - self.at)


class Acceptance:
    """Chances by proposer and grade, over all requests, shifted by what each request has shown lately.

    A request that stops accepting is known for it after two or three drafts, and forgiven slowly.
    """

    def __init__(self) -> None:
        self.now = 0
        self._rates: dict[tuple[str, int], _Rate] = {}
        self._own: dict[str, dict[str, _Own]] = {}

    def tick(self, steps: int = 1) -> None:
        """Time goes by."""
        self.now += steps

    def mean(self, source: str, grade: int) -> float:
        """Over all requests."""
        rate = self._rates.get((source, grade))
        return PRIOR if rate is None else rate.mean(self.now)

    def chance(self, request_id: str, source: str, grade: int) -> float:
        """That a token of this grade stands in this request, if those before it do; in (0, 1)."""
        mean = self.mean(source, grade)
        own = self._own.get(request_id, {}).get(source)
        if own is None:
            return mean
        return 1 / (1 + math.exp(-_logit(mean) - own.shift_now(self.now)))

    def learn(self, request_id: str, source: str, grade: int, accepted: int, tried: int) -> None:
        """``accepted`` of ``tried`` tokens stood (the first that does not ends the trial)."""
        expected = tried * self.mean(source, grade)
        rate = self._rates.get((source, grade))
        if rate is None:
            rate = self._rates[source, grade] = _Rate(at=self.now)
        rate.add(accepted, tried, self.now)
        sources = self._own.setdefault(request_id, {})
        own = sources.get(source)
        if own is None:
            own = sources[source] = _Own()
        own.add(accepted, tried, expected, self.now)

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)


def _logit(p: float) -> float:
    p = min(max(p, 0.005), 0.995)
    return math.log(p / (1 - p))
