"""The workers of a large fleet that are worth pricing for a request: those with the shortest queues and the fewest
streams, of its zone and of all, and a few at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from random import Random
from typing import TYPE_CHECKING

from serve_app.routing.costs import CostModel

if TYPE_CHECKING:
    from serve_app.routing.fleet import Worker

# A fleet of up to this size is priced whole.
PRICE_ALL = 16
SHORTLIST = 5
# How many decisions a shortlist serves before it is drawn up again.
SHORTLIST_DECISIONS = 48
# Workers drawn at random that are priced as well, since the list goes stale while it is used.
BY_CHANCE = 4
# Prompt tokens by which the speed of workers is compared.
USUAL_PROMPT = 2048


@dataclass(slots=True)
class _List:
    chosen: list[Worker]
    others: list[Worker]
    left: int = SHORTLIST_DECISIONS


class Shortlists:
    """One for each zone that requests come from. ``forget`` them when a worker has come or gone."""

    def __init__(self, costs: CostModel, random: Random) -> None:
        self._costs = costs
        self._random = random
        self._lists: dict[str, _List] = {}

    def forget(self) -> None:
        self._lists.clear()

    def candidates(self, workers: Mapping[str, Worker], zone: str, now: float) -> list[Worker]:
        """``zone``: of the request, "" where it is not known."""
        found = self._lists.get(zone)
        if found is None or found.left <= 0:
            found = self._lists[zone] = self._drawn_up(list(workers.values()), zone, now)
        found.left -= 1
        some = {w.name: w for w in found.chosen}
        for _ in range(min(BY_CHANCE, len(found.others))):
            other = found.others[int(self._random.random() * len(found.others))]
            some[other.name] = other
        return [w for name, w in some.items() if name in workers]

    def _drawn_up(self, able: list[Worker], zone: str, now: float) -> _List:
        chosen = self._least_loaded(able, now)
        near = [w for w in able if w.load.zone == zone] if zone else []
        if 0 < len(near) < len(able):
            chosen |= self._least_loaded(near, now)
        return _List(list(chosen.values()), [w for w in near or able if w.name not in chosen])

    def _least_loaded(self, able: list[Worker], now: float) -> dict[str, Worker]:
        # Of those with the shortest queues the fast ones: a usual prompt counts as well.
        prompt = self._costs.prefill_seconds(USUAL_PROMPT)

        def done(w: Worker) -> float:
            return max(w.busy_until - now, 0.0) + prompt * w.slow

        def filled(w: Worker) -> float:
            return (w.batch + 1) / w.load.max_seqs * w.slow

        by_queue = nsmallest(SHORTLIST, able, key=lambda w: (w.role == "decode", done(w)))
        by_streams = nsmallest(SHORTLIST, able, key=lambda w: (w.role == "prefill", filled(w)))
        by_either = nsmallest(SHORTLIST // 2, able, key=lambda w: done(w) + w.step)
        return {w.name: w for w in (*by_queue, *by_streams, *by_either)}
