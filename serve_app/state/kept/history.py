"""What was done in each minute and each hour: counts and histograms that add up, whichever gateway they are of.

Each gateway writes the minute that is over, and its hour so far, once a minute. A row is replaced as a whole by the
gateway that has it, so writing it twice is writing it once, and one that dies loses at most its last minute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

MINUTE_S, HOUR_S = 60, 3600
KEPT_S = {MINUTE_S: 25 * 3600.0, HOUR_S: 400 * 86_400.0}
# The account that stands for all of them.
EVERYBODY = ""

# The numbers of a row, in this order: counts, and then each histogram's buckets and its sum in microseconds.
COUNTS = (
    "requests",
    "errors",
    "refusals",
    "left",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "neurons",
    "money",
)
# Upper borders in seconds, as OpenTelemetry's conventions for generative AI have them; above the last is one bucket
# more. gen_ai.server.time_to_first_token, .time_per_output_token and .request.duration.
BORDERS: dict[str, tuple[float, ...]] = {
    "ttft": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    "itl": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    "duration": (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
}
_AT = {name: number for number, name in enumerate(COUNTS)}
_BEGIN: dict[str, int] = {}
SIZE = len(COUNTS)
for _name, _borders in BORDERS.items():
    _BEGIN[_name] = SIZE
    SIZE += len(_borders) + 2


class Numbers(list[int]):
    """:data:`SIZE` whole numbers. ``neurons``: micro-neurons; ``money``: nano-units of the price list's currency."""

    __slots__ = ()

    def __init__(self, given: Iterable[int] = ()) -> None:
        super().__init__(given)
        if not self:
            self.extend([0] * SIZE)

    def bump(self, name: str, more: int = 1) -> None:
        self[_AT[name]] += more

    def observe(self, name: str, seconds: float) -> None:
        begin, borders = _BEGIN[name], BORDERS[name]
        self[begin + bisect_left(borders, seconds)] += 1
        self[begin + len(borders) + 1] += round(seconds * 1e6)

    def add(self, other: Sequence[int]) -> None:
        """Of a version that had fewer numbers, those that it had."""
        for at, number in enumerate(other[:SIZE]):
            if number:
                self[at] += number

    def of(self, name: str) -> int:
        return self[_AT[name]]

    def buckets(self, name: str) -> list[int]:
        """Of a histogram, one more than it has borders."""
        begin = _BEGIN[name]
        return self[begin : begin + len(BORDERS[name]) + 1]

    def sum_s(self, name: str) -> float:
        return self[_BEGIN[name] + len(BORDERS[name]) + 1] / 1e6

    def quantile(self, name: str, share: float) -> float | None:
        """Seconds below which ``share`` of the observations lie, as if they were spread evenly in each bucket; at most
        the last border. None without any.
        """
        buckets, borders = self.buckets(name), BORDERS[name]
        if not (total := sum(buckets)):
            return None
        left, low = share * total, 0.0
        for count, high in zip(buckets, borders, strict=False):
            if count and left <= count:
                return low + (high - low) * left / count
            left, low = left - count, high
        return borders[-1]


@dataclass(slots=True, frozen=True)
class HistoryRow:
    """What one gateway did for one account (or :data:`EVERYBODY`) with one model in ``width`` seconds from ``at``."""

    width: int
    at: int
    gateway: str
    account: str
    model: str
    numbers: Sequence[int]


class HistoryStore(Protocol):
    """All calls block and raise `Away`."""

    def write(self, rows: Sequence[HistoryRow]) -> None: ...

    def read(
        self, width: int, since: int, until: int, account: str | None, model: str | None = None
    ) -> list[HistoryRow]:
        """Rows that begin from ``since`` to before ``until``, of one account, or of each (None)."""

    def trim(self, now: float) -> None: ...
