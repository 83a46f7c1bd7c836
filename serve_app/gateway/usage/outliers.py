"""What stands out: days on which something used more than its own 95th percentile of the 30 days before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.api.errors import InvalidInput
from serve_app.gateway.usage.read import Parameters, accounts, grouped, number, values
from serve_app.state.spending.ledger import DAY_S
from serve_app.state.spending.usage import Dimension, UsageQuery, UsageRow

DAYS_BEFORE = 30
DAYS_SHOWN = 7
MOST_DAYS = 60
SHARE = 0.95
# Rows of one look, and what is told of them at most.
MOST_ROWS = 200_000
MOST = 100
GROUPS: tuple[Dimension, ...] = ("model", "key", "task", "adapter")


@dataclass(slots=True, frozen=True)
class Outlier:
    """``account`` used ``neurons`` on the day that begins at ``at`` (unix seconds) by the ``name`` of a ``group``;
    ``usual``: the percentile. Both in micro-neurons.
    """

    at: int
    account: str
    group: str
    name: str
    neurons: int
    usual: float

    @property
    def ratio(self) -> float:
        return self.neurons / self.usual


@dataclass(slots=True, frozen=True)
class OutlierRequest:
    """``first``: when the first day begins that may stand out. ``account``: whose; None: of ``only``, or of all."""

    groups: tuple[Dimension, ...]
    first: int
    today: int
    account: str | None
    only: tuple[str, ...]

    def query(self, group: Dimension) -> UsageQuery:
        return UsageQuery(
            since=self.first - DAYS_BEFORE * DAY_S,
            until=self.today + DAY_S,
            account=self.account,
            width=DAY_S,
            by=("account", group),
            only={"account": self.only} if self.only else {},
            units=(),
            limit=MOST_ROWS,
        )


def parse_outliers(given: Parameters, account: str, now: float, *, everybody: bool) -> OutlierRequest:
    """``account``: of the path. ``everybody``: the caller may see all accounts. Raises `ApiError`."""
    days = number(values(given, "days"), "days", 1, MOST_DAYS, DAYS_SHOWN)
    groups = grouped(values(given, "group_by"), "group_by", GROUPS) or ("model", "key")
    wanted = accounts(values(given, "account"), account, everybody=everybody)
    today = int(now) // DAY_S * DAY_S
    alone = wanted[0] if wanted is not None and len(wanted) == 1 else None
    only = tuple(wanted) if wanted is not None and alone is None else ()
    return OutlierRequest(groups, today - (days - 1) * DAY_S, today, alone, only)


def outliers(rows: Iterable[UsageRow], group: Dimension, first: int, today: int) -> list[Outlier]:
    """Of the days from ``first`` to ``today``, in any order. What was not used in the 30 days before has nothing usual,
    and does not stand out.
    """
    found = []
    used: dict[tuple[str, str], dict[int, int]] = {}
    for row in rows:
        days = used.setdefault((row.dimensions["account"], row.dimensions[group]), {})
        assert row.at is not None
        days[row.at] = days.get(row.at, 0) + row.neurons
    for (account, name), days in used.items():
        for at in range(first, today + 1, DAY_S):
            if not (neurons := days.get(at, 0)):
                continue
            usual = quantile([days.get(at - before * DAY_S, 0) for before in range(1, DAYS_BEFORE + 1)], SHARE)
            if 0 < usual < neurons:
                found.append(Outlier(at, account, group, name, neurons, usual))
    return found


def most_unusual(found: Iterable[Outlier]) -> list[Outlier]:
    return sorted(found, key=lambda one: (-one.ratio, one.at, one.account, one.group, one.name))[:MOST]


def quantile(found: Sequence[int], share: float) -> float:
    """Between two values in proportion to their distances."""
    ordered = sorted(found)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def check_all(total: int, seen: int) -> None:
    if total > seen:
        raise InvalidInput(f"There are {total} sums of days; name an account, or group by less.", param="group_by")
