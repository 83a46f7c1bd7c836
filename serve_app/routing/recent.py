"""How much of something there has lately been each second."""

from __future__ import annotations

import math


class Recent:
    """Over about ``tau`` seconds, what is older counts less and less. Right from the start: what has been watched for a
    moment only is taken to have gone on like that, but for no less than ``least`` seconds.
    """

    __slots__ = ("_at", "_least", "_since", "_sum", "_tau")

    def __init__(self, tau: float, least: float | None = None) -> None:
        self._tau = tau
        self._least = tau if least is None else least
        self._sum = 0.0
        self._at: float | None = None
        self._since = 0.0

    def add(self, amount: float, now: float) -> None:
        self._decay(now)
        self._sum += amount

    def rate(self, now: float, more: float = 0.0) -> float:
        """Each second; with ``more`` beside, if it came now."""
        if self._at is None:
            return more / self._least
        self._decay(now)
        watched = self._tau * (1.0 - math.exp(-(self._at - self._since) / self._tau))
        return (self._sum + more) / max(watched, self._least)

    def _decay(self, now: float) -> None:
        if self._at is None:
            self._at = self._since = now
        elif now > self._at:
            self._sum *= math.exp(-(now - self._at) / self._tau)
            self._at = now
