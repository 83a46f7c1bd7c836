"""Whether a request is better off in another cluster: the policy alone, without clock and network.

Each cluster tells a straight line for the first token of a prompt: what waits there, what a request costs by itself,
and seconds for each token that no cache holds. It is compared with this cluster's own estimate::

    there = wait + base + token x uncached        as told, up to a second ago
          + what was passed there since           seconds, over its workers
          + round trip + bytes of the prompt / upload rate
    pass  : there + margin < here

The margin is what keeps requests from going to and fro: estimates are old and err, so two clusters that are about as
busy as each other exchange nothing. A request is passed once: a cluster that is handed one serves it or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class PassConfig:
    """``margin_s``, ``share``: a request is passed if that saves so many seconds at least, and that part of the time
    here. ``upload``: bytes per second that prompts travel at.
    """

    margin_s: float = 0.5
    share: float = 0.3
    upload: float = 10e6


@dataclass(slots=True, frozen=True)
class Line:
    """Seconds to the first token of a prompt, as a straight line: ``wait`` for what goes before, ``base`` for any
    prompt, and ``token`` for each of its tokens that has to be computed.
    """

    wait: float
    base: float
    token: float

    def ttft(self, uncached: int) -> float:
        return self.wait + self.base + self.token * uncached


@dataclass(slots=True)
class Option:
    """A cluster that could serve a request. ``latency``: seconds of a round trip. ``cached``: prompt tokens that it
    holds. ``sent``: uncached tokens that were passed there since it told its ``line``; ``workers`` share them.
    """

    name: str
    latency: float
    line: Line
    cached: int = 0
    sent: int = 0
    workers: int = 1


@dataclass(slots=True, frozen=True)
class Choice:
    """``ttft``: expected seconds to the first token in the cluster ``name``, its distance included."""

    name: str
    ttft: float


class Passing:
    """``choose`` for each request that this cluster cannot serve at once."""

    def __init__(self, config: PassConfig | None = None) -> None:
        self.config = config or PassConfig()

    def ttft(self, option: Option, prompt_tokens: int) -> float:
        """Seconds until the first token is here, if the request goes there now."""
        uncached = max(prompt_tokens - option.cached, 1)
        queued = option.sent * option.line.token / max(option.workers, 1)
        moved = 4 * prompt_tokens / self.config.upload
        return option.line.ttft(uncached) + queued + option.latency + moved

    def worth(self, own: float) -> float:
        """What another cluster has to stay below, where a request takes ``own`` seconds here."""
        return own - max(self.config.margin_s, self.config.share * own)

    def choose(
        self, own: float | None, prompt_tokens: int, options: Iterable[Option], left: float | None = None
    ) -> Choice | None:
        """The cluster to pass a request to, or None to keep it. ``own``: predicted seconds to its first token here;
        None: this cluster cannot serve it. ``left``: seconds in which the first token must be there.

        What would be late here is passed to whoever is in time, margin or not; nothing is passed to be late there.
        """
        limit = math.inf if own is None or (left is not None and own > left) else self.worth(own)
        if left is not None:
            limit = min(limit, left)
        best: Choice | None = None
        for option in options:
            ttft = self.ttft(option, prompt_tokens)
            if ttft < limit and (best is None or (ttft, option.name) < (best.ttft, best.name)):
                best = Choice(option.name, ttft)
        return best
