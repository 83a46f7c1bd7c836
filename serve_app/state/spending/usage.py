"""What is asked of the ledger's sums, and what they answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, get_args

from serve_app.state.spending.ledger import DAY_S, HOUR_S

# What usage can be grouped by and asked for.
Dimension = Literal["account", "key", "model", "task", "adapter", "batch", "status", "currency"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
# Seconds of a bucket; months have as many as they have.
Width = int | Literal["month"]
# Buckets that one answer may have.
MAX_BUCKETS = 20_000


@dataclass(slots=True, frozen=True)
class Order:
    """``by``: "time", a dimension, "entries", "seconds", "neurons", "money" or a unit."""

    by: str = "time"
    descending: bool = False


@dataclass(slots=True, frozen=True)
class UsageQuery:
    """Sums over work that ended from ``since`` to before ``until`` (unix seconds), of one ``account`` or of all.

    ``width``: of time buckets, which begin at multiples of it in UTC; None: no buckets. ``by``: what else to group by.
    ``only`` and ``but``: values that a dimension must have and must not. ``units``: those to sum, all unless told.
    """

    since: int
    until: int
    account: str | None
    width: Width | None = None
    by: tuple[Dimension, ...] = ()
    only: Mapping[Dimension, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    but: Mapping[Dimension, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    units: tuple[str, ...] | None = None
    order: tuple[Order, ...] = (Order(),)
    limit: int = 1000
    offset: int = 0

    @property
    def buckets(self) -> int:
        """How many there may be."""
        if self.width is None:
            return 1
        width = self.width if isinstance(self.width, int) else 28 * DAY_S
        return max(0, -(-self.until // width) - self.since // width)


@dataclass(slots=True, frozen=True)
class UsageRow:
    """One group. ``at``: when its bucket begins. ``dimensions``: those it was grouped by. ``units`` without zeros.
    ``neurons``: micro-neurons; ``money``: nano-units of the currency among ``dimensions``.
    """

    at: int | None
    dimensions: Mapping[str, str]
    entries: int
    seconds: float
    units: Mapping[str, int]
    neurons: int
    money: int


@dataclass(slots=True, frozen=True)
class UsagePage:
    """``rows`` of ``total``. ``since``, ``until``: the time that was summed: a bound inside an hour whose entries have
    been dropped takes in the whole hour.
    """

    rows: tuple[UsageRow, ...]
    total: int
    since: int
    until: int


_RELATIVE = re.compile(r"([0-9]{1,6})(m|h|d|w)")
_SECONDS = {"m": 60, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
# The year 9999 has the last date that there is.
_LATEST = 253_402_214_400


def moment(text: str, now: float) -> int:
    """Unix seconds of a date (2026-11-22: 00:00 UTC), a time (2026-11-22T06:00:00Z; UTC unless it says otherwise), unix
    seconds, or how long before ``now`` (36h, 7d, 2w). Raises :class:`ValueError`.
    """
    text = text.strip()
    if relative := _RELATIVE.fullmatch(text):
        return max(0, int(now) - int(relative[1]) * _SECONDS[relative[2]])
    try:
        if text.isascii() and text.isdigit():
            found = float(text[:15])
        else:
            read = datetime.fromisoformat(text)
            found = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text[:40]!r} is no time. Write 2026-11-22, 2026-11-22T06:00:00Z, or 7d.") from None
    if not 0 <= found <= _LATEST:
        raise ValueError(f"{text[:40]!r} is no time of this era.")
    return int(found)


def widened(query: UsageQuery, entries_since: float) -> tuple[int, int]:
    """The time that can be summed: what lies before ``entries_since`` is known by the hour only."""
    since, until = query.since, query.until
    if since % HOUR_S and since < entries_since:
        since -= since % HOUR_S
    if until % HOUR_S and until < entries_since:
        until += -until % HOUR_S
    return since, until


def month_of(at: int) -> int:
    """When the month of a moment began (unix seconds, UTC)."""
    moment = datetime.fromtimestamp(at, UTC)
    return int(datetime(moment.year, moment.month, 1, tzinfo=UTC).timestamp())


def month_after(at: int) -> int:
    """When the month of a moment ends, and the next one begins (unix seconds, UTC)."""
    return month_of(month_of(at) + 31 * DAY_S)


def months(since: int, until: int) -> list[int]:
    """When each month begins that has a part of the time (unix seconds, UTC)."""
    found, start = [], month_of(since)
    while start < until:
        found.append(start)
        start = month_after(start)
    return found
