"""Usage and costs of an organisation, as OpenAI has them: pages of time buckets with the groups of each.

An account is what OpenAI calls a project. The organisation is what the caller may see: the own account, or for an admin
of the account of the settings every one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from serve_app.api.errors import InvalidInput
from serve_app.api.receipt import NANO
from serve_app.gateway.usage.read import Parameters, accounts, bounded, grouped, number, one, values
from serve_app.gateway.usage.write import merged
from serve_app.state.spending.ledger import DAY_S, HOUR_S
from serve_app.state.spending.usage import Dimension, UsageQuery, UsageRow

# By `bucket_width`: seconds, buckets of a page unless told, and at most.
WIDTHS: Mapping[str, tuple[int, int, int]] = {"1m": (60, 60, 1440), "1h": (HOUR_S, 24, 168), "1d": (DAY_S, 7, 31)}
COST_WIDTHS: Mapping[str, tuple[int, int, int]] = {"1d": (DAY_S, 7, 180)}
MAX_TIME = 2**40
_PAGE = "page_"
# What work can be grouped by, and what it is called here; None: everything is in one group.
GROUPS: Mapping[str, Dimension | None] = {
    "project_id": "account",
    "api_key_id": "key",
    "model": "model",
    "batch": "batch",
    "line_item": "model",
    "user_id": None,
    "service_tier": None,
    "api_source": None,
}
COMPLETIONS = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source")
EMBEDDINGS = ("project_id", "user_id", "api_key_id", "model")
COSTS = ("project_id", "user_id", "line_item", "api_key_id", "api_source")
# What stands in a group where nothing tells one from another.
_ALL_ALIKE = {"user_id": None, "service_tier": "default", "api_source": "unlabeled"}


@dataclass(slots=True, frozen=True)
class AskedBuckets:
    """``query`` covers one page: ``count`` buckets of ``width`` seconds. ``next_page`` is "" on the last one."""

    query: UsageQuery
    width: int
    count: int
    groups: tuple[str, ...]
    next_page: str


def parse_buckets(
    given: Parameters,
    own: str,
    now: float,
    *,
    everybody: bool,
    groups: Sequence[str],
    widths: Mapping[str, tuple[int, int, int]] = WIDTHS,
    only: Mapping[Dimension, tuple[str, ...]] = MappingProxyType({}),
    by: tuple[Dimension, ...] = (),
    units: tuple[str, ...] = (),
) -> AskedBuckets:
    """``only``: what kind of work is asked for; ``by``: what is grouped by in any case. Raises `ApiError`."""
    width_name = one(values(given, "bucket_width"), "bucket_width") or "1d"
    if width_name not in widths:
        raise InvalidInput(f"bucket_width must be one of {', '.join(widths)}.", param="bucket_width")
    width, usual, most = widths[width_name]
    start = _time(given, "start_time")
    if start is None:
        raise InvalidInput("start_time is missing; send unix seconds.", param="start_time")
    end, present = _time(given, "end_time"), int(now) + 1
    if end is not None and end <= start:
        raise InvalidInput("end_time must be after start_time.", param="end_time")
    # Buckets begin at multiples of their width. There are none of the future, and this one ends when it ends.
    end = None if end is None or end >= present else end
    first, last = start // width, -(-(present if end is None else end) // width)
    limit = number(values(given, "limit"), "limit", 1, most, usual)
    begin = max(first, _cursor(one(values(given, "page"), "page"), first))
    stop = min(begin + limit, last)
    chosen = grouped(values(given, "group_by"), "group_by", groups)
    query = UsageQuery(
        since=max(begin * width, start),
        until=stop * width if end is None else min(stop * width, end),
        account=None,
        width=width,
        by=tuple(dict.fromkeys((*(name for group in chosen if (name := GROUPS[group]) is not None), *by))),
        only=dict(only) | _filters(given),
        units=units,
        but={"batch": ("",)} if _flag(given, "batch") else {},
        limit=100_000,
    )
    named = values(given, "project_ids")
    if named or not everybody:
        query = _of_accounts(query, accounts(named, own, everybody=everybody))
    next_page = f"{_PAGE}{stop}" if stop < last else ""
    return AskedBuckets(bounded(query), width, max(stop - begin, 0), tuple(chosen), next_page)


def render_completions(asked: AskedBuckets, rows: Iterable[UsageRow]) -> dict[str, Any]:
    return _page(asked, rows, _completion)


def render_embeddings(asked: AskedBuckets, rows: Iterable[UsageRow]) -> dict[str, Any]:
    return _page(asked, rows, _embedding)


def render_costs(asked: AskedBuckets, rows: Iterable[UsageRow]) -> dict[str, Any]:
    return _page(asked, rows, _cost)


def _completion(asked: AskedBuckets, row: UsageRow) -> dict[str, Any]:
    read, cached = row.units.get("input_tokens", 0), row.units.get("cached_tokens", 0)
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": read,
        "output_tokens": row.units.get("output_tokens", 0),
        "input_cached_tokens": cached,
        "input_uncached_tokens": read - cached,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": row.entries,
        **_group(asked, row, COMPLETIONS),
    }


def _embedding(asked: AskedBuckets, row: UsageRow) -> dict[str, Any]:
    return {
        "object": "organization.usage.embeddings.result",
        "input_tokens": row.units.get("input_tokens", 0),
        "num_model_requests": row.entries,
        **_group(asked, row, EMBEDDINGS),
    }


def _cost(asked: AskedBuckets, row: UsageRow) -> dict[str, Any]:
    return {
        "object": "organization.costs.result",
        "amount": {"value": row.money / NANO, "currency": row.dimensions["currency"].lower()},
        "quantity": None,
        **_group(asked, row, COSTS),
    }


def _page(asked: AskedBuckets, rows: Iterable[UsageRow], write: Any) -> dict[str, Any]:
    """Every bucket of the page, those without a result as well."""
    if "batch" in asked.groups:
        rows = merged([_whether(row) for row in rows])
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        assert row.at is not None
        found.setdefault(row.at, []).append(write(asked, row))
    begin = asked.query.since - asked.query.since % asked.width
    data = [
        {
            "object": "bucket",
            "start_time": max(start, asked.query.since),
            "end_time": min(start + asked.width, asked.query.until),
            "results": found.get(start, []),
        }
        for start in range(begin, begin + asked.count * asked.width, asked.width)
    ]
    return {
        "object": "page",
        "data": data,
        "has_more": bool(asked.next_page),
        "next_page": asked.next_page or None,
    }


def _whether(row: UsageRow) -> UsageRow:
    """The row with whether it was of a batch instead of which."""
    dimensions = {**row.dimensions, "batch": "true" if row.dimensions["batch"] else ""}
    return UsageRow(row.at, dimensions, row.entries, row.seconds, row.units, row.neurons, row.money)


def _group(asked: AskedBuckets, row: UsageRow, known: Sequence[str]) -> dict[str, Any]:
    """What the row is of: null for what was not grouped by."""
    found: dict[str, Any] = {}
    for name in known:
        dimension = GROUPS[name]
        if name not in asked.groups:
            found[name] = None
        elif dimension is None:
            found[name] = _ALL_ALIKE[name]
        else:
            found[name] = bool(row.dimensions[dimension]) if name == "batch" else row.dimensions[dimension]
    return found


def _filters(given: Parameters) -> dict[Dimension, tuple[str, ...]]:
    if values(given, "user_ids"):
        raise InvalidInput("user_ids: keys here belong to accounts; ask by api_key_ids.", param="user_ids")
    names: Mapping[str, Dimension] = {"models": "model", "api_key_ids": "key", "line_items": "model"}
    found = {dimension: tuple(chosen) for name, dimension in names.items() if (chosen := values(given, name))}
    return found | ({"batch": ("",)} if _flag(given, "batch") is False else {})


def _of_accounts(query: UsageQuery, wanted: Sequence[str] | None) -> UsageQuery:
    if wanted is None:  # all of them, by that name
        return query
    if len(wanted) == 1:
        return replace(query, account=wanted[0])
    return replace(query, only={**query.only, "account": tuple(wanted)})


def _flag(given: Parameters, name: str) -> bool | None:
    text = one(values(given, name), name).lower()
    if text not in ("", "true", "false"):
        raise InvalidInput(f"{name} must be true or false.", param=name)
    return None if not text else text == "true"


def _time(given: Parameters, name: str) -> int | None:
    found = values(given, name)
    return number(found, name, 0, MAX_TIME, 0) if found else None


def _cursor(page: str, first: int) -> int:
    """Which bucket a page begins with."""
    if not page:
        return first
    told = page.removeprefix(_PAGE)
    if told == page or not (told.isascii() and told.isdigit() and len(told) <= 12):
        raise InvalidInput("page must be the next_page of an earlier answer.", param="page")
    return int(told)
