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
        self.target = target
        self._gap = 0.0
        self._since = 0.0  # seconds in which texts have waited for a step of theirs
        self._generates = False

    def took(self, seconds: float, generated: float, *, least: float = 0.0, waits: bool = False) -> None:
        """A step is over, which gave each text that it generated for so many tokens; 0: it generated for none.
        ``waits``: texts wait for other steps that are under way; ``least``: seconds from token to token where steps of
        several texts overlap.
        """
        self._generates = generated > 0 or waits
        if generated <= 0:
            self._since = self._since + seconds if waits else 0.0
            return
        gap = max(self._since + seconds, least) / generated
        self._since = 0.0
        self._gap += (1.0 - math.exp(-generated / TOKENS)) * (gap - self._gap)

    def tokens(self, most: int, least: int = 1) -> int:
        """What the next step may take of the ``most`` that there is memory for; ``least``: texts, which all have a
        token at any rate.
        """
        late = self.target is not None and self._generates and self._gap > FROM * self.target
        return min(max(most // 2, least), most) if late else most
