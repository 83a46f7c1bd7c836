"""How many tokens a step takes while texts are generated: as many as memory allows, or half of them while the gaps
between tokens are too long.

A large step computes prompts soonest, and all texts beside it stand still for as long. What a target of gaps is worth
depends on the moment: with few texts or short prompts nobody notices a step twice as long. So the mean gap of late
decides, and not a smaller step at all times.
"""

from __future__ import annotations

import math

# Tokens of each text over which gaps are averaged, and the part of the target from which on steps are halved.
TOKENS = 64
FROM = 0.8


class Pace:
    """Of one engine. ``target``: seconds between two tokens of a text, as a mean; None: every step may be full."""

    def __init__(self, target: float | None = None) -> None:
        self._target = target
        self._gap = 0.0
        self._generates = False

    def took(self, seconds: float, generated: float) -> None:
        """A step is over, which gave each text that it generated for so many tokens; 0: it generated for none."""
        self._generates = generated > 0
        if self._generates:
            gap = seconds / generated
            self._gap += (1.0 - math.exp(-generated / TOKENS)) * (gap - self._gap)

    def tokens(self, most: int, least: int = 1) -> int:
        """What the next step may take of the ``most`` that there is memory for; ``least``: texts, which all have a
        token at any rate.
        """
        late = self._target is not None and self._generates and self._gap > FROM * self._target
        return min(max(most // 2, least), most) if late else most
