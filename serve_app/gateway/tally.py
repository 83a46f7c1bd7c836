"""Counts of settled work: for metrics since the start of this gateway, live by the second, and by minute for history.

A request is counted once, into the second at hand; seconds are added up once they are over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from serve_app.gateway.neighbours.counts import Counts
from serve_app.gateway.stage_times import StageTimes
from serve_app.state.kept.history import EVERYBODY, HOUR_S, MINUTE_S, HistoryRow, Numbers
from serve_app.tasks.work import Settled, Work

# Seconds that "now" looks back.
LIVE_S = 10
# Pairs of account and model that are told apart; what more there are share one name.
MAX_PAIRS = 2000
OTHERS = "(others)"


class Pair(NamedTuple):
    account: str
    model: str


class Tally:
    """A subscriber of :class:`serve_app.tasks.work.Settlement`. ``gateway`` names its rows in the history."""

    def __init__(self, gateway: str = "") -> None:
        self.gateway = gateway
        self.requests: Counter[tuple[str, str]] = Counter()  # by model and status
        self.tokens: Counter[tuple[str, str]] = Counter()  # by model and kind
        self.since_start: dict[str, Numbers] = {}  # by model
        self.stages = StageTimes()
        self.neighbours = Counts()
        self._second: dict[Pair, Numbers] = {}
        self._live: deque[tuple[float, dict[Pair, Numbers]]] = deque(maxlen=LIVE_S)
        self._minute: dict[Pair, Numbers] = {}
        self._hour: dict[Pair, Numbers] = {}
        self._at: int | None = None
        self._ticked: float | None = None
        # Tokens of work under way that are counted already, by its id.
        self._counted: dict[int, int] = {}

    def __call__(self, settled: Settled) -> None:
        usage = settled.usage
        self.stages(settled)
        self.requests[settled.model, settled.status] += 1
        self.tokens[settled.model, "cached"] += usage.cached_tokens
        self.tokens[settled.model, "prompt"] += usage.prompt_tokens - usage.cached_tokens
        self.tokens[settled.model, "completion"] += usage.completion_tokens
        numbers = self._numbers(settled.caller.account, settled.model)
        numbers.bump("requests")
        if settled.status != "done":
            numbers.bump({"failed": "errors", "refused": "refusals", "left": "left"}[settled.status])
        numbers.bump("prompt_tokens", usage.prompt_tokens)
        numbers.bump("cached_tokens", usage.cached_tokens)
        numbers.bump("completion_tokens", usage.completion_tokens - self._counted.pop(settled.work_id, 0))
        if settled.entry is not None:
            numbers.bump("neurons", settled.entry.neurons)
            numbers.bump("money", settled.entry.money)
        if settled.ttft_s is not None:
            numbers.observe("ttft", settled.ttft_s)
        if settled.itl_s is not None:
            numbers.observe("itl", settled.itl_s)
        if settled.status == "done":
            numbers.observe("duration", settled.seconds)

    def tick(self, now: float, wall: float, running: Iterable[Work]) -> list[HistoryRow]:
        """A second is over: the rows to write, where a minute is. ``now``: on a clock that only goes forward; ``wall``:
        unix seconds. ``running``: work whose tokens so far are counted.
        """
        for work in running:
            work.look()
            more = work.usage.completion_tokens - self._counted.get(id(work), 0)
            if more > 0:
                self._numbers(work.caller.account, work.model.id).bump("completion_tokens", more)
                self._counted[id(work)] = work.usage.completion_tokens
        second, self._second = self._second, {}
        since = now - 1.0 if self._ticked is None else self._ticked
        self._live.append((now - since, second))
        self._ticked = now
        minute = int(wall) // MINUTE_S * MINUTE_S
        rows = []
        if self._at is None:
            self._at = minute
        elif minute != self._at:
            rows = self.rows()
            if minute // HOUR_S != self._at // HOUR_S:
                self._hour = {}
            self._minute, self._at = {}, minute
        for pair, numbers in second.items():
            self.since_start.setdefault(pair.model, Numbers()).add(numbers)
            for whole in (self._minute, self._hour):
                whole.setdefault(pair, Numbers()).add(numbers)
        return rows

    def rows(self) -> list[HistoryRow]:
        """Of the minute at hand, and of the hours so far of what it has."""
        if self._at is None:
            return []
        hour = self._at // HOUR_S * HOUR_S
        found = _with_everybody(self._minute)
        hours = _with_everybody(self._hour)
        rows = [HistoryRow(MINUTE_S, self._at, self.gateway, *pair, numbers) for pair, numbers in found.items()]
        rows += [HistoryRow(HOUR_S, hour, self.gateway, *pair, hours[pair]) for pair in found]
        return rows

    def live(self) -> tuple[float, dict[Pair, Numbers]]:
        """Seconds, up to :data:`LIVE_S` or a bit more, and what was done in them."""
        found: dict[Pair, Numbers] = {}
        for _, second in self._live:
            for pair, numbers in second.items():
                found.setdefault(pair, Numbers()).add(numbers)
        return sum(seconds for seconds, _ in self._live), found

    def _numbers(self, account: str, model: str) -> Numbers:
        pair = Pair(account, model)
        found = self._second.get(pair)
        if found is None:
            if pair not in self._hour and len(self._hour) + len(self._second) >= MAX_PAIRS:
                pair = Pair(OTHERS, model)
            found = self._second.setdefault(pair, Numbers())
        return found


def _with_everybody(found: dict[Pair, Numbers]) -> dict[Pair, Numbers]:
    whole = dict(found)
    for (_, model), numbers in found.items():
        whole.setdefault(Pair(EVERYBODY, model), Numbers()).add(numbers)
    return whole
