"""Whose turn it is for a place: rows and blocks are shared among accounts by weight, also those that are taken.

While some are free anybody gets them. Once none is, a request that has waited for a moment takes the place of one of
the account that has most for its weight, if that account still has at least as much for its weight afterwards. So the
shares of two accounts only come closer, and a place never goes to and fro between them. Who has made way comes first
among its account's, and goes on from the prefix cache.

What shares cannot settle, time does: requests that have made way, and accounts that find no place because there are
more accounts than places, change places every few seconds with those that have been there as long. What is computed
again for that stays below a tenth of the time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from serve_app.costs.places import GAP_S, PATIENCE_S, TURN_S
from serve_app.costs.steps import StepModel
from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.request import Request

# Of the time, what may be spent on computing again what was given up; and the longest that an account below its share
# is kept waiting for that.
PART = 0.1
LONGEST_S = 1.0


class Turns:
    """Of one engine. ``waits`` when a request begins to wait, ``order`` for who is next, ``makes_way`` for who gives
    its place to it; ``goes_on`` when it has one. ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.given = 0  # places, since the start
        self._clock = clock
        # When the next place may be given: to an account below its share, and to one whose turn it is.
        self._share_at = self._turn_at = 0.0

    def waits(self, request: Request, *, paused: bool = False) -> None:
        """From now on. ``paused``: it has made way for another."""
        request.since, request.paused = self._clock(), paused

    def goes_on(self, request: Request, start: int, costs: StepModel) -> None:
        """It has a place, and what comes before token ``start`` is in its blocks."""
        now = self._clock()
        if request.paused:
            pause = costs.chunk_seconds(len(request.tokens) - start, start) / PART
            self._share_at = max(self._share_at, now + min(pause, LONGEST_S))
            self._turn_at = max(self._turn_at, now) + pause
        request.since, request.paused = now, False

    def order(self, waiting: Sequence[Request], running: Sequence[Request]) -> list[Request]:
        """The first of ``waiting`` of each account; that of the account that has least for its weight comes first."""
        heads: dict[bytes, Request] = {}
        for request in waiting:
            heads.setdefault(request.tenant, request)
        if len(heads) == 1:
            return [waiting[0]]
        held = Counter(r.tenant for r in running)
        return sorted(heads.values(), key=lambda r: ((held[r.tenant] + 1) / r.weight, r.since))

    def makes_way(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Who gives its place to ``request``, which is next; None: nobody has to, or not yet."""
        now = self._clock()
        waited = now - request.since
        if waited < PATIENCE_S or now < self._share_at:
            return None
        held = Counter(r.tenant for r in running)
        mine = held[request.tenant] + 1

        def above(other: Request, places: int) -> bool:
            """Whether the account of ``other`` with so many places has no less for its weight than ours would have."""
            return other.tenant != request.tenant and places * request.weight >= mine * other.weight

        able = [r for r in running if not r.prefill_only and not r.under_way]
        found = [r for r in able if above(r, held[r.tenant] - 1)]
        if not found and waited >= TURN_S and now >= self._turn_at:
            found = [
                r
                for r in able
                if now - r.since >= TURN_S
                and (above(r, held[r.tenant]) or (request.paused and r.tenant == request.tenant))
            ]
        if not found:
            return None
        most = max(held[r.tenant] / r.weight for r in found)
        self._share_at = now + GAP_S
        self._turn_at = max(self._turn_at, now + GAP_S)
        self.given += 1
        # Whoever is about to end gives the place back by itself; what lies in full blocks is not lost.
        return max(
            (r for r in found if held[r.tenant] / r.weight == most),
            key=lambda r: (now - r.since >= TURN_S, r.left, -(r.computed % BLOCK_TOKENS)),
        )

    def latest(self, running: Sequence[Request]) -> Request:
        """Who gives its blocks up where there are too few: the latest comer of the account that has most."""
        last = running[-1]
        if all(r.tenant == last.tenant for r in running):
            return last
        held = Counter(r.tenant for r in running)
        most = max(held[r.tenant] / r.weight for r in running)
        return next(r for r in reversed(running) if held[r.tenant] / r.weight == most)
