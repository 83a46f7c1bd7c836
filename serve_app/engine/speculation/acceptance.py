"""How likely a draft token is to stand, learned from what the target chose.

::

    mean     of a proposer's drafts of one grade, over all requests, over about the last 200 tokens
    chance   mean · (stood + w) / (expected + w)     of this request's last 12 tokens or so, with w = own_weight

A request that stops accepting is known for it after two or three tokens, and forgiven slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.speculation.policy import Policy

# Where nothing is known yet: worth trying, soon overruled by what happens.
PRIOR, PRIOR_WEIGHT = 0.7, 4.0
WINDOW, OWN_WINDOW, OWN_FADE = 200.0, 12.0, 0.97


@dataclass(slots=True)
class _Counts:
    """Decayed sums at step ``at``: tokens that stood, and tokens tried (of one request: expected to stand)."""

    stood: float
    tried: float
    at: int

    def add(self, stood: float, tried: float, window: float) -> None:
        self.stood += stood
        self.tried += tried
        if self.tried > window:
            self.stood, self.tried = self.stood * window / self.tried, window


class Acceptance:
    """Chances by proposer and grade, over all requests, corrected by what each request has shown lately."""

    def __init__(self, policy: Policy) -> None:
        self.now = 0
        self._policy = policy
        self._means: dict[tuple[str, int], _Counts] = {}
        self._own: dict[str, dict[str, _Counts]] = {}

    def tick(self, steps: int = 1) -> None:
        """Time goes by."""
        self.now += steps

    def mean(self, source: str, grade: int) -> float:
        """Over all requests."""
        counts = self._faded(source, grade)
        return counts.stood / counts.tried

    def chance(self, request_id: str, source: str, grade: int) -> float:
        """That a token of this grade stands in this request, if those before it do; in (0, 1)."""
        mean, own = self.mean(source, grade), self._own.get(request_id, {}).get(source)
        if own is None:
            return mean
        keep, weight = OWN_FADE ** (self.now - own.at), self._policy.own_weight
        return min(0.99, mean * (1 + (own.stood - own.tried) * keep / (own.tried * keep + weight)))

    def learn(self, request_id: str, source: str, grade: int, stood: int, tried: int) -> None:
        """``stood`` of ``tried`` tokens did (the first that does not ends the trial)."""
        mean = self.mean(source, grade)
        self._faded(source, grade).add(stood, tried, WINDOW)
        own = self._own.setdefault(request_id, {}).setdefault(source, _Counts(0.0, 0.0, self.now))
        keep = OWN_FADE ** (self.now - own.at)
        own.stood, own.tried, own.at = own.stood * keep, own.tried * keep, self.now
        own.add(stood, tried * mean, OWN_WINDOW * mean)

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)

    def _faded(self, source: str, grade: int) -> _Counts:
        """The counts of all requests, gone back towards the prior by the time that has passed."""
        key = (source, grade if self._policy.grades else 0)
        counts = self._means.get(key)
        if counts is None:
            counts = self._means[key] = _Counts(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT, self.now)
        elif counts.at != self.now:
            keep = self._policy.fade ** (self.now - counts.at)
            counts.stood = counts.stood * keep + PRIOR * PRIOR_WEIGHT * (1 - keep)
            counts.tried = counts.tried * keep + PRIOR_WEIGHT * (1 - keep)
            counts.at = self.now
        return counts
