"""The types of Cloudflare's GraphQL Analytics API that tell of Workers AI, by the names they have there.

::

    viewer { accounts(filter: {accountTag}) {
        aiInferenceAdaptiveGroups(filter, limit, orderBy) { count sum {...} avg {...} dimensions {...} }
        aiInferenceAdaptive(filter, limit, orderBy) { datetime modelId neurons ... } } }

`apiKeyId`, `adapter`, `batch`, `status` and `totalCachedInputTokens` are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphql import (
    GraphQLArgument,
    GraphQLEnumType,
    GraphQLField,
    GraphQLFloat,
    GraphQLInputField,
    GraphQLInputObjectType,
    GraphQLInt,
    GraphQLList,
    GraphQLNonNull,
    GraphQLObjectType,
    GraphQLScalarType,
    GraphQLSchema,
    GraphQLString,
)

from serve_app.state.spending.ledger import DAY_S, HOUR_S

# Seconds of each dimension of time.
TIMES: Mapping[str, int] = {
    "date": DAY_S,
    "datetimeHour": HOUR_S,
    "datetimeFifteenMinutes": 900,
    "datetimeFiveMinutes": 300,
    "datetimeMinute": 60,
    "datetime": 1,
}
# Dimensions as the ledger calls them.
NAMES: Mapping[str, str] = {
    "modelId": "model",
    "apiKeyId": "key",
    "taskName": "task",
    "adapter": "adapter",
    "batch": "batch",
    "status": "status",
}
# Dimensions that follow from one of the ledger's.
DERIVED: Mapping[str, str] = {
    "errorCode": "status",
    "costMetricName1": "task",
    "costMetricName2": "task",
    "requestSource": "task",
}
DIMENSIONS = (*TIMES, *NAMES, *DERIVED)
SUMS = (
    "totalNeurons",
    "totalInputTokens",
    "totalCachedInputTokens",
    "totalOutputTokens",
    "totalInferenceTimeMs",
    "totalAudioSeconds",
    "totalRequestBytesIn",
    "totalRequestBytesOut",
    "totalCostMetricValue1",
    "totalCostMetricValue2",
)
# Fields of single requests that can be asked to be at least something.
VALUES = ("neurons", "inputTokens", "outputTokens", "inferenceTimeMs", "costMetricValue1", "costMetricValue2")
COMPARISONS = ("", "_gt", "_geq", "_lt", "_leq")
CHOICES = ("", "_in", "_neq", "_notin")


def _scalar(name: str, about: str) -> GraphQLScalarType:
    return GraphQLScalarType(name, description=about)


# Clients name the types of their variables by either; the values are checked where they are used.
string = _scalar("string", "A text.")
time_ = _scalar("Time", "A time, as 2026-11-22T06:00:00Z.")
date_time = _scalar("DateTime", "The same as Time.")
date = _scalar("Date", "A date of UTC, as 2026-11-22.")
uint64 = _scalar("uint64", "A whole number.")
float64 = _scalar("float64", "A number.")


def _of(name: str) -> GraphQLScalarType:
    return date if name == "date" else time_


def _filter_fields(this: Any) -> dict[str, GraphQLInputField]:
    fields: dict[str, Any] = {f"{name}{how}": _of(name) for name in TIMES for how in COMPARISONS}
    for name in (*NAMES, *DERIVED):
        kind = uint64 if name == "errorCode" else string
        fields |= {f"{name}{how}": GraphQLList(kind) if how in ("_in", "_notin") else kind for how in CHOICES}
    fields |= {f"{name}{how}": float64 for name in VALUES for how in COMPARISONS}
    fields |= {"AND": GraphQLList(GraphQLNonNull(this())), "OR": GraphQLList(GraphQLNonNull(this()))}
    return {name: GraphQLInputField(kind) for name, kind in fields.items()}


def _filter(name: str) -> GraphQLInputObjectType:
    made = GraphQLInputObjectType(name, lambda: _filter_fields(lambda: made))
    return made


def _orders(name: str, fields: tuple[str, ...]) -> GraphQLEnumType:
    return GraphQLEnumType(name, {f"{field}_{way}": f"{field}_{way}" for field in fields for way in ("ASC", "DESC")})


def _fields(kinds: Mapping[str, Any]) -> dict[str, GraphQLField]:
    return {name: GraphQLField(kind) for name, kind in kinds.items()}


def _dimension(name: str) -> Any:
    return _of(name) if name in TIMES else uint64 if name == "errorCode" else string


def _data_set(made: Any, filtered: Any, orders: GraphQLEnumType, resolve: Any) -> GraphQLField:
    arguments = {
        "filter": GraphQLArgument(filtered),
        "limit": GraphQLArgument(uint64),
        "orderBy": GraphQLArgument(GraphQLList(orders)),
    }
    return GraphQLField(GraphQLNonNull(GraphQLList(GraphQLNonNull(made))), arguments, resolve=resolve)


def build_schema(viewer_accounts: Any, groups: Any, requests: Any) -> GraphQLSchema:
    """``viewer_accounts``, ``groups`` and ``requests`` resolve the three lists."""
    total = {name: float64 if name in ("totalNeurons", "totalAudioSeconds") else uint64 for name in SUMS}
    group = GraphQLObjectType(
        "AccountAiInferenceAdaptiveGroups",
        {
            "count": GraphQLField(GraphQLNonNull(uint64)),
            "sum": GraphQLField(GraphQLObjectType("AccountAiInferenceAdaptiveGroupsSum", _fields(total))),
            "avg": GraphQLField(
                GraphQLObjectType("AccountAiInferenceAdaptiveGroupsAvg", _fields({"sampleInterval": float64}))
            ),
            "dimensions": GraphQLField(
                GraphQLObjectType(
                    "AccountAiInferenceAdaptiveGroupsDimensions", _fields({n: _dimension(n) for n in DIMENSIONS})
                )
            ),
        },
    )
    single = {**{n: _dimension(n) for n in DIMENSIONS}, **dict.fromkeys(VALUES, float64)}
    request = GraphQLObjectType(
        "AccountAiInferenceAdaptive", _fields({**single, "requestId": string, "sampleInterval": uint64})
    )
    sums = ("count", *(f"sum_{name}" for name in SUMS))
    account = GraphQLObjectType(
        "account",
        {
            "accountTag": GraphQLField(string),
            "aiInferenceAdaptiveGroups": _data_set(
                group,
                _filter("AccountAiInferenceAdaptiveGroupsFilter_InputObject"),
                _orders("AccountAiInferenceAdaptiveGroupsOrderBy", (*DIMENSIONS, *sums)),
                groups,
            ),
            "aiInferenceAdaptive": _data_set(
                request,
                _filter("AccountAiInferenceAdaptiveFilter_InputObject"),
                _orders("AccountAiInferenceAdaptiveOrderBy", ("datetime",)),
                requests,
            ),
        },
    )
    account_filter = GraphQLInputObjectType(
        "AccountFilter",
        {"accountTag": GraphQLInputField(string), "accountTag_in": GraphQLInputField(GraphQLList(string))},
    )
    viewer = GraphQLObjectType(
        "viewer",
        {
            "accounts": GraphQLField(
                GraphQLNonNull(GraphQLList(GraphQLNonNull(account))),
                {"filter": GraphQLArgument(account_filter), "limit": GraphQLArgument(uint64)},
                resolve=viewer_accounts,
            )
        },
    )
    query = GraphQLObjectType("Query", {"viewer": GraphQLField(viewer, resolve=lambda *_: {})})
    spoken = [string, time_, date_time, date, uint64, float64, GraphQLString, GraphQLInt, GraphQLFloat]
    return GraphQLSchema(query, types=spoken)
