"""The query of ``GET .../ai/usage``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.api.errors import AccountForbidden, InvalidInput
from serve_app.catalog.pricing import UNITS
from serve_app.catalog.tasks import declared
from serve_app.state.spending.ledger import DAY_S, HOUR_S
from serve_app.state.spending.usage import DIMENSIONS, MAX_BUCKETS, Dimension, Order, UsageQuery, Width, moment

INTERVALS: Mapping[str, Width | None] = {"hour": HOUR_S, "day": DAY_S, "month": "month", "none": None}
DEFAULT_DAYS = 30
MAX_PER_PAGE, DEFAULT_PER_PAGE = 10_000, 100
ALL = "all"
# What rows can be ordered by besides what they are grouped by.
MEASURES = ("time", "requests", "seconds", "neurons", "cost")
_COLUMNS = {"requests": "entries", "cost": "money"}


class Parameters(Protocol):
    """A query string."""

    def getlist(self, key: str) -> list[str]: ...


@dataclass(slots=True, frozen=True)
class UsageRequest:
    """``page`` counts from 1."""

    query: UsageQuery
    interval: str
    page: int
    per_page: int
    csv: bool


def parse_usage(given: Parameters, account: str, now: float, *, everybody: bool) -> UsageRequest:
    """``account``: of the path. ``everybody``: the caller may see all accounts. Raises `ApiError`."""
    found = {name: values(given, name) for name in ("since", "until", "interval", "group_by", "order", "account")}
    interval = one(found["interval"], "interval") or "day"
    if interval not in INTERVALS:
        raise InvalidInput(f"interval must be one of {', '.join(INTERVALS)}.", param="interval")
    width = INTERVALS[interval]
    until = when(found["until"], "until", now) or int(now) + 1
    # From the beginning of a day, so that the first bucket is as long as the others.
    since = when(found["since"], "since", now)
    since = (int(now) // DAY_S - DEFAULT_DAYS) * DAY_S if since is None else since
    by = grouped(found["group_by"], "group_by")
    wanted = accounts(found["account"], account, everybody=everybody)
    only: dict[Dimension, tuple[str, ...]]
    only = {name: tuple(chosen) for name in DIMENSIONS if name != "account" and (chosen := values(given, name))}
    if wanted is not None and len(wanted) > 1:
        only["account"] = tuple(wanted)
    page = number(values(given, "page"), "page", 1, 10**6, 1)
    per_page = number(values(given, "per_page"), "per_page", 1, MAX_PER_PAGE, DEFAULT_PER_PAGE)
    shape = one(values(given, "format"), "format") or "json"
    if shape not in ("json", "csv"):
        raise InvalidInput("format must be json or csv.", param="format")
    query = UsageQuery(
        since=since,
        until=until,
        account=wanted[0] if wanted is not None and len(wanted) == 1 else None,
        width=width,
        # Sums of several currencies would be of none.
        by=tuple(dict.fromkeys((*by, "currency"))),
        only=only,
        units=counted(),
        order=tuple(_order(text, by) for text in found["order"]) or (Order(),),
        limit=per_page,
        offset=(page - 1) * per_page,
    )
    return UsageRequest(bounded(query), interval, page, per_page, shape == "csv")


def counted() -> tuple[str, ...]:
    """The units that some task counts in: to sum the others as well would take a year's rows twice as long."""
    keys = {key for task in declared().values() for key in task.units}
    return tuple(unit.name for unit in UNITS if unit.key in keys)


def bounded(query: UsageQuery) -> UsageQuery:
    """The query, if it asks for no more buckets than one answer may have. Raises `InvalidInput`."""
    if query.buckets > MAX_BUCKETS:
        message = f"The time has {query.buckets} buckets; one answer has at most {MAX_BUCKETS}. Ask for less time."
        raise InvalidInput(message, param="since")
    return query


def accounts(named: Sequence[str], own: str, *, everybody: bool) -> list[str] | None:
    """Whose usage is asked for; None: everybody's. Without a word it is the ``own`` account's."""
    if not named:
        return [own]
    if ALL in named:
        if not everybody:
            raise AccountForbidden(ALL)
        return None
    for name in named:
        if name != own and not everybody:
            raise AccountForbidden(name)
    return list(dict.fromkeys(named))


def values(given: Parameters, name: str) -> list[str]:
    """Of a parameter that may come several times, with commas, or with brackets as OpenAI's client writes it."""
    found = [part.strip() for text in (*given.getlist(name), *given.getlist(f"{name}[]")) for part in text.split(",")]
    if len(found) > 200:
        raise InvalidInput(f"{name} must have at most 200 values.", param=name)
    # PostgreSQL takes no NUL in a text.
    if any(len(part) > 512 or "\0" in part for part in found):
        raise InvalidInput(f"{name}: no value here is like that.", param=name)
    return [part for part in found if part]


def one(found: Sequence[str], name: str) -> str:
    if len(found) > 1:
        raise InvalidInput(f"{name} must be given once.", param=name)
    return found[0] if found else ""


def when(found: Sequence[str], name: str, now: float) -> int | None:
    text = one(found, name)
    try:
        return moment(text, now) if text else None
    except ValueError as error:
        raise InvalidInput(f"{name}: {error}", param=name) from None


def number(found: Sequence[str], name: str, low: int, high: int, default: int) -> int:
    text = one(found, name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and low <= int(text[:12]) <= high):
        raise InvalidInput(f"{name} must be a whole number from {low} to {high}.", param=name)
    return int(text)


def grouped(found: Sequence[str], name: str, allowed: Collection[str] = DIMENSIONS) -> tuple[Dimension, ...]:
    for wanted in found:
        if wanted not in allowed:
            raise InvalidInput(f"{name}: {wanted[:40]!r} is none of {', '.join(allowed)}.", param=name)
    return tuple(dict.fromkeys(found))  # type: ignore[arg-type]


def _order(text: str, by: Sequence[str]) -> Order:
    """``neurons``, or ``-neurons`` for the largest first."""
    name = text.removeprefix("-")
    if name not in (*MEASURES, *by):
        message = f"order: {name[:40]!r} is none of {', '.join((*MEASURES, *by))}; a - before it turns it round."
        raise InvalidInput(message, param="order")
    return Order(_COLUMNS.get(name, name), text.startswith("-"))
