"""The lists that a query can ask for, from the store's sums and entries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from graphql import (
    FieldNode,
    FragmentSpreadNode,
    GraphQLError,
    GraphQLResolveInfo,
    InlineFragmentNode,
    SelectionSetNode,
)

from serve_app.api.errors import ApiError
from serve_app.api.receipt import MICRO
from serve_app.catalog.pricing import UNIT_NAMES
from serve_app.catalog.pricing import UNITS as PRICED
from serve_app.catalog.tasks import declared
from serve_app.gateway.usage.graphql.filters import CODES, read_filter, span
from serve_app.gateway.usage.graphql.schema import DERIVED, NAMES, SUMS, TIMES
from serve_app.gateway.usage.read import bounded
from serve_app.gateway.usage.write import merged, time_text
from serve_app.state.spending.ledger import Entry
from serve_app.state.spending.usage import Order, UsagePage, UsageQuery, UsageRow

MAX_ACCOUNTS = 16
MAX_LIMIT = 10_000
# Groups that are read to make one list.
MAX_GROUPS = 50_000
DEFAULT_DAYS = 31
# What each sum is made of.
UNITS: Mapping[str, tuple[str, ...]] = {
    "totalInputTokens": ("input_tokens",),
    "totalCachedInputTokens": ("cached_tokens",),
    "totalOutputTokens": ("output_tokens",),
    "totalAudioSeconds": ("audio_ms", "streamed_audio_ms"),
    "totalCostMetricValue1": UNIT_NAMES,
    "totalCostMetricValue2": UNIT_NAMES,
}

Sums = Callable[[UsageQuery], Awaitable[UsagePage]]
Entries = Callable[[UsageQuery], Awaitable[list[Entry]]]


@dataclass(slots=True, frozen=True)
class Looks:
    """What a query can see: ``own`` account, others only where ``may_see(account)``."""

    own: str
    may_see: Callable[[str], bool]
    sums: Sums
    entries: Entries
    now: float


def accounts(_: Any, info: GraphQLResolveInfo, **arguments: Any) -> list[dict[str, str]]:
    looks: Looks = info.context
    filtered = arguments.get("filter") or {}
    named = [filtered["accountTag"]] if filtered.get("accountTag") is not None else filtered.get("accountTag_in")
    wanted = [looks.own] if named is None else list(dict.fromkeys(named))
    if len(wanted) > MAX_ACCOUNTS:
        raise GraphQLError(f"The query names {len(wanted)} accounts; at most {MAX_ACCOUNTS} at once.")
    for account in wanted:
        if account != looks.own and not (isinstance(account, str) and looks.may_see(account)):
            raise GraphQLError("not authorized for that account", extensions={"code": "authz"})
    return [{"accountTag": account} for account in wanted]


async def groups(account: dict[str, str], info: GraphQLResolveInfo, **arguments: Any) -> list[dict[str, Any]]:
    looks: Looks = info.context
    limit, orders = _limit(arguments), [str(order) for order in arguments.get("orderBy") or ()]
    found = read_filter(arguments.get("filter"), looks.now)
    asked = _asked_dimensions(info)
    by = [name for name in asked if name not in TIMES]
    base = [NAMES.get(name) or DERIVED[name] for name in by]
    summed = {*_selected(info, "sum"), *(order.removeprefix("sum_").rpartition("_")[0] for order in orders)}
    if any(name.startswith("totalCostMetric") for name in summed):
        base.append("task")
    widths = [TIMES[name] for name in asked if name in TIMES]
    since, until = span(found, looks.now, DEFAULT_DAYS)
    if found.nothing or since >= until:
        return []
    query = UsageQuery(
        since=since,
        until=until,
        account=account["accountTag"],
        width=min(widths, default=None),
        by=tuple(dict.fromkeys(base)),  # type: ignore[arg-type]
        only=found.only,  # type: ignore[arg-type]
        but=found.but,  # type: ignore[arg-type]
        units=_units(summed),
        limit=MAX_GROUPS,
    )
    page = await _seen(looks.sums, query)
    if page.total > len(page.rows):
        raise GraphQLError(f"There are {page.total} groups; ask for less time, or for fewer dimensions.")
    found_groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in merged(page.rows):
        dimensions = {name: _dimension(name, row) for name in asked}
        sums = _sums(row)
        same = found_groups.setdefault(
            tuple(dimensions.values()),
            {"count": 0, "sum": dict.fromkeys(SUMS, 0), "avg": {"sampleInterval": 1}, "dimensions": dimensions},
        )
        same["count"] += row.entries
        for name in SUMS:
            same["sum"][name] += sums[name]
    listed = _ordered(list(found_groups.values()), orders)[:limit]
    for group in listed:
        group["sum"] = {
            name: value / MICRO if name == "totalNeurons" else value / 1000 if name == "totalAudioSeconds" else value
            for name, value in group["sum"].items()
        }
    return listed


async def requests(account: dict[str, str], info: GraphQLResolveInfo, **arguments: Any) -> list[dict[str, Any]]:
    looks: Looks = info.context
    found = read_filter(arguments.get("filter"), looks.now)
    since, until = span(found, looks.now, DEFAULT_DAYS)
    if found.nothing or since >= until:
        return []
    orders = [str(order) for order in arguments.get("orderBy") or ()]
    query = UsageQuery(
        since=since,
        until=until,
        account=account["accountTag"],
        only=found.only,  # type: ignore[arg-type]
        but=found.but,  # type: ignore[arg-type]
        order=(Order("time", orders[:1] == ["datetime_DESC"]),),
        limit=_limit(arguments),
    )
    return [_request(entry) for entry in await _seen(looks.entries, query)]


async def _seen(look: Callable[[UsageQuery], Awaitable[Any]], query: UsageQuery) -> Any:
    """What the store says. An error that a client can do something about is told in GraphQL's way."""
    try:
        return await look(bounded(query))
    except ApiError as error:
        raise GraphQLError(error.message) from None


def _limit(arguments: Mapping[str, Any]) -> int:
    given = arguments.get("limit")
    if given is None:
        return MAX_LIMIT
    if isinstance(given, bool) or not isinstance(given, int) or not 0 < given <= MAX_LIMIT:
        raise GraphQLError(f"limit must be a whole number from 1 to {MAX_LIMIT}.")
    return given


def _asked_dimensions(info: GraphQLResolveInfo) -> list[str]:
    """The fields of ``dimensions`` that the query selects: groups are made by these."""
    return [name for name in _selected(info, "dimensions") if name in TIMES or name in NAMES or name in DERIVED]


def _units(summed: Collection[str]) -> tuple[str, ...]:
    """The units behind the sums that are asked for."""
    wanted = [unit for name, units in UNITS.items() if name in summed for unit in units]
    return tuple(dict.fromkeys(wanted))


def _selected(info: GraphQLResolveInfo, field: str) -> list[str]:
    """Names of the fields below ``field`` of the list at hand, fragments put in."""
    outer = [node.selection_set for node in info.field_nodes if node.selection_set is not None]
    inner = [n.selection_set for n in _fields(outer, info) if n.name.value == field and n.selection_set is not None]
    return list(dict.fromkeys(node.name.value for node in _fields(inner, info)))


def _fields(sets: Sequence[SelectionSetNode], info: GraphQLResolveInfo) -> list[FieldNode]:
    found: list[FieldNode] = []
    for selected in sets:
        for node in selected.selections:
            if isinstance(node, FieldNode):
                found.append(node)
            elif isinstance(node, InlineFragmentNode):
                found += _fields([node.selection_set], info)
            elif isinstance(node, FragmentSpreadNode):
                found += _fields([info.fragments[node.name.value].selection_set], info)
    return found


def _dimension(name: str, row: UsageRow) -> Any:
    if name in TIMES:
        assert row.at is not None
        return _time(name, row.at)
    if name in NAMES:
        return row.dimensions[NAMES[name]]
    return _derived(name, row.dimensions[DERIVED[name]])


def _derived(name: str, value: str) -> Any:
    if name == "errorCode":
        return CODES.get(value, CODES["failed"])
    if name == "requestSource":
        return "rest"
    return _metrics(value)[int(name[-1]) - 1]


@cache
def _metrics(task: str) -> tuple[str, str]:
    """The units that a task is mostly paid by, which `costMetricName1` and `2` name; "" for none."""
    known = declared().get(task)
    keys = known.units if known is not None else ()
    first, second, *_ = [*(u.name for u in PRICED if u.key in keys and u.name != "cached_tokens"), "", ""]
    return first, second


def _time(name: str, at: float) -> str:
    text = time_text(at - at % TIMES[name])
    return text[:10] if name == "date" else text


def _sums(row: UsageRow) -> dict[str, int]:
    """Whole numbers: neurons in millionths, audio in milliseconds. Bytes are not recorded."""
    metrics = _metrics(row.dimensions.get("task", ""))
    return {
        "totalNeurons": row.neurons,
        "totalInputTokens": row.units.get("input_tokens", 0),
        "totalCachedInputTokens": row.units.get("cached_tokens", 0),
        "totalOutputTokens": row.units.get("output_tokens", 0),
        "totalInferenceTimeMs": round(row.seconds * 1000),
        "totalAudioSeconds": row.units.get("audio_ms", 0) + row.units.get("streamed_audio_ms", 0),
        "totalRequestBytesIn": 0,
        "totalRequestBytesOut": 0,
        "totalCostMetricValue1": row.units.get(metrics[0], 0),
        "totalCostMetricValue2": row.units.get(metrics[1], 0),
    }


def _request(entry: Entry) -> dict[str, Any]:
    row = UsageRow(int(entry.at), _dimensions_of(entry), 1, entry.seconds, entry.units, entry.neurons, entry.money)
    sums = _sums(row)
    return {
        **{name: _time(name, entry.at) for name in TIMES},
        **{name: getattr(entry, column) for name, column in NAMES.items()},
        **{name: _derived(name, getattr(entry, column)) for name, column in DERIVED.items()},
        "neurons": entry.neurons / MICRO,
        "inputTokens": sums["totalInputTokens"],
        "outputTokens": sums["totalOutputTokens"],
        "inferenceTimeMs": sums["totalInferenceTimeMs"],
        "costMetricValue1": sums["totalCostMetricValue1"],
        "costMetricValue2": sums["totalCostMetricValue2"],
        "requestId": entry.id,
        "sampleInterval": 1,
    }


def _dimensions_of(entry: Entry) -> dict[str, str]:
    return {"task": entry.task}


def _ordered(groups: list[dict[str, Any]], orders: Sequence[str]) -> list[dict[str, Any]]:
    """What is ordered by something that groups do not have stays as it is: by time."""
    for order in reversed(orders):
        name, _, way = order.rpartition("_")
        place, _, field = name.partition("_")

        def key(group: dict[str, Any], name: str = name, place: str = place, field: str = field) -> Any:
            if name == "count":
                return group["count"]
            return group["sum"][field] if place == "sum" else group["dimensions"].get(name, "")

        groups.sort(key=key, reverse=way == "DESC")
    return groups
