"""The GraphQL that Cloudflare's users send: variables of whatever type they write, aliases, filters and orders."""

from __future__ import annotations

from typing import Any

import pytest
from graphql import get_introspection_query

from serve_app.gateway.usage.write import time_text
from serve_app.state.spending.ledger import DAY_S, HOUR_S
from tests.gateway.usage.conftest import CHAT, EMBED, START

PATH = "/client/v4/graphql"
TIMES = {"start": time_text(START), "end": time_text(START + 3 * DAY_S - 1)}
VARIABLES = {"accountTag": "local", **TIMES, "day": time_text(START)[:10]}
BETWEEN = "filter: {datetime_geq: $start, datetime_leq: $end}"


async def ask(served: Any, query: str, who: str = "operator", **variables: Any) -> dict[str, Any]:
    answer = await served.call("POST", PATH, who, json={"query": query, "variables": {**VARIABLES, **variables}})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def groups(served: Any, inner: str, head: str = "", who: str = "operator", **variables: Any) -> Any:
    """The lists of one account, of a query that has no errors."""
    known = head or "$accountTag: string!, $start: Time!, $end: Time!, $day: Date"
    # One that is declared has to be used.
    used = [part for part in known.split(", ") if part.partition(":")[0] in f"$accountTag {inner}"]
    declared = ", ".join(used)
    query = f"query Usage({declared}) {{ viewer {{ accounts(filter: {{accountTag: $accountTag}}) {{ {inner} }} }} }}"
    told = await ask(served, query, who, **variables)
    assert told["errors"] is None, told
    (account,) = told["data"]["viewer"]["accounts"]
    return account


@pytest.mark.parametrize(
    "head",
    [
        "$accountTag: string!, $start: Time!, $end: Time!",
        "$accountTag: String!, $start: DateTime!, $end: DateTime!",
        "$accountTag: string, $start: string, $end: string",
        "$accountTag: String!, $start: String!, $end: Time",
    ],
)
async def test_totals_by_model_under_aliases(served, head):
    found = await groups(
        served,
        f"""total: aiInferenceAdaptiveGroups({BETWEEN}, limit: 1) {{ sum {{ totalNeurons }} }}
            byModel: aiInferenceAdaptiveGroups({BETWEEN}, limit: 100, orderBy: [sum_totalNeurons_DESC]) {{
              count sum {{ totalNeurons totalInputTokens totalOutputTokens totalInferenceTimeMs }}
              dimensions {{ modelId }} avg {{ sampleInterval }}
            }}""",
        head,
    )
    assert found["total"] == [{"sum": {"totalNeurons": 10.5}}]
    assert found["byModel"] == [
        {
            "count": 5,
            "sum": {
                "totalNeurons": 10.0,
                "totalInputTokens": 500,
                "totalOutputTokens": 50,
                "totalInferenceTimeMs": 2500,
            },
            "dimensions": {"modelId": CHAT},
            "avg": {"sampleInterval": 1},
        },
        {
            "count": 1,
            "sum": {"totalNeurons": 0.5, "totalInputTokens": 7, "totalOutputTokens": 0, "totalInferenceTimeMs": 500},
            "dimensions": {"modelId": EMBED},
            "avg": {"sampleInterval": 1},
        },
    ]


async def test_by_day_and_by_hour(served):
    found = await groups(
        served,
        """days: aiInferenceAdaptiveGroups(limit: 31, filter: {date_geq: $day}, orderBy: [date_ASC]) {
             sum { totalNeurons } dimensions { date } }
           back: aiInferenceAdaptiveGroups(filter: {date_geq: $day}, orderBy: [date_DESC], limit: 1) {
             dimensions { date } }
           hours: aiInferenceAdaptiveGroups(filter: {date: $day}, orderBy: [datetimeHour_ASC]) {
             count dimensions { datetimeHour date } }
           hour: aiInferenceAdaptiveGroups(filter: {datetimeHour: $start}) { count }""",
    )
    days = [START, START + DAY_S, START + 2 * DAY_S]
    assert [g["dimensions"]["date"] for g in found["days"]] == [time_text(day)[:10] for day in days]
    assert [g["sum"]["totalNeurons"] for g in found["days"]] == [6.0, 2.5, 2.0]
    assert found["back"] == [{"dimensions": {"date": time_text(days[2])[:10]}}]
    hours = [(g["dimensions"]["datetimeHour"], g["count"]) for g in found["hours"]]
    assert hours == [(time_text(START), 2), (time_text(START + HOUR_S), 1)]
    assert found["hours"][0]["dimensions"]["date"] == time_text(START)[:10] and found["hour"] == [{"count": 2}]


async def test_the_dashboards_query(served):
    """By quarters of an hour, with what is charged for by name, and conditions that are always true."""
    found = await groups(
        served,
        """aiInferenceAdaptiveGroups(
             filter: {datetime_geq: $start, datetime_leq: $end, modelId_in: $models,
                      neurons_geq: 0, costMetricValue1_geq: 0, costMetricValue2_geq: 0},
             orderBy: [datetimeFifteenMinutes_ASC], limit: 10000) {
             sum { totalCostMetricValue1 totalCostMetricValue2 totalNeurons __typename }
             dimensions { datetimeFifteenMinutes modelId costMetricName1 costMetricName2 __typename }
             __typename }""",
        "$accountTag: string!, $start: Time, $end: Time, $models: [string]",
        models=[CHAT, EMBED],
    )
    told = [
        (g["dimensions"]["datetimeFifteenMinutes"], g["dimensions"]["costMetricName1"],
         g["dimensions"]["costMetricName2"], g["sum"]["totalCostMetricValue1"], g["sum"]["totalCostMetricValue2"])
        for g in found["aiInferenceAdaptiveGroups"]
    ]  # fmt: skip
    generated = ("input_tokens", "output_tokens", 100, 10)
    fifth = START + DAY_S + 5 * HOUR_S
    assert told == [
        (time_text(START), *generated),
        (time_text(START + 2700), *generated),
        (time_text(START + HOUR_S), *generated),
        (time_text(fifth), *generated),
        (time_text(fifth + 900), "input_tokens", "", 7, 0),
        (time_text(START + 2 * DAY_S), *generated),
    ]


@pytest.mark.parametrize(
    ("filtered", "count"),
    [
        ("{datetime_geq: $start, datetime_lt: $end}", 6),
        ("{datetime_gt: $start, datetime_leq: $end, modelId: $model}", 1),
        ("{AND: [{datetime_geq: $start}, {modelId_neq: $model}]}", 5),
        ("{date_geq: $day, modelId_notin: [$model]}", 5),
        ("{date_gt: $day}", 3),
        ("{date_leq: $day, date_geq: $day}", 3),
        ("{date_geq: $day, apiKeyId: \"key2\"}", 1),
        ("{date_geq: $day, errorCode_neq: 0}", 1),
        ("{date_geq: $day, errorCode: 0, modelId_in: [$model, \"x\"]}", 1),
        ("{date_geq: $day, modelId: $model, AND: [{modelId: \"x\"}]}", 0),
        ("{date_geq: $day, date_lt: $day}", 0),
    ],
)  # fmt: skip
async def test_filters(served, filtered, count):
    head = "$accountTag: string!, $start: Time!, $end: Time!, $day: Date, $model: string"
    inner = f"aiInferenceAdaptiveGroups(filter: {filtered}, limit: 5) {{ count }}"
    found = (await groups(served, inner, head, model=EMBED))["aiInferenceAdaptiveGroups"]
    assert sum(group["count"] for group in found) == count


async def test_single_requests(served):
    found = await groups(
        served,
        f"""rows: aiInferenceAdaptive({BETWEEN}, limit: 2, orderBy: [datetime_DESC]) {{
              datetime modelId requestSource neurons inputTokens outputTokens inferenceTimeMs errorCode sampleInterval
            }}""",
    )
    assert [row["datetime"] for row in found["rows"]] == [
        time_text(START + 2 * DAY_S),
        time_text(START + DAY_S + 5 * HOUR_S + 901),
    ]
    assert found["rows"][1] == found["rows"][1] | {"modelId": EMBED, "neurons": 0.5, "inputTokens": 7, "errorCode": 0}
    assert found["rows"][0]["sampleInterval"] == 1 and found["rows"][0]["inferenceTimeMs"] == 500


async def test_who_sees_whose(served):
    totals = "aiInferenceAdaptiveGroups(filter: {date_geq: $day}) { count }"
    head = "$accountTag: string!, $day: Date"
    for who in ("team", "operator"):
        found = await groups(served, totals, head, who, accountTag="team")
        assert found["aiInferenceAdaptiveGroups"] == [{"count": 2}]
    for who in ("team", "admin"):
        told = await ask(served, '{ viewer { accounts(filter: {accountTag: "local"}) { accountTag } } }', who)
        assert told["data"]["viewer"] is None
        assert told["errors"][0]["message"] == "not authorized for that account"
        assert told["errors"][0]["extensions"]["code"] == "authz"
    own = await ask(served, "{ viewer { accounts { accountTag } } }", "team")
    assert own["data"]["viewer"]["accounts"] == [{"accountTag": "team"}]
    assert (await served.call("POST", PATH, "runs", json={"query": "{ viewer { __typename } }"})).status_code == 403


async def test_tools_can_read_the_schema(served):
    told = await ask(served, get_introspection_query())
    names = {kind["name"] for kind in told["data"]["__schema"]["types"]}
    assert {"AccountAiInferenceAdaptiveGroups", "AccountAiInferenceAdaptiveGroupsOrderBy", "Time", "uint64"} <= names


def nested(depth: int) -> str:
    return "{ viewer " + "{ accounts " * depth + "{ accountTag }" + " }" * depth + " }"


LIST = "x%d: aiInferenceAdaptiveGroups(limit: 1) { count }"
DOUBLING = " ".join(f"fragment f{n} on Query {{ viewer {{ __typename }} ...f{n + 1} ...f{n + 1} }}" for n in range(11))


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("{ viewer {", "Syntax Error"),
        ("{ nothing }", "Cannot query field 'nothing'"),
        (nested(30), "deeper than"),
        ("{ viewer { accounts { " + " ".join(LIST % n for n in range(17)) + " } } }", "at most 16 at once"),
        ("{ viewer { " + "__typename " * 3000 + "} }", "tokens"),
        ("query { ...f0 } " + DOUBLING + " fragment f11 on Query { viewer { __typename } }", "more than 2000 fields"),
        ("query { ...a } fragment a on Query { ...a }", "contains itself"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(limit: 0) { count } } } }", "limit must be"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(filter: {OR: [{}]}) { count } } } }", "OR is not supported"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(filter: {neurons_gt: 5}) { count } } } }", "at least 0"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(filter: {date: \"soon\"}) { count } } } }", "is no time"),
        ("{ viewer { accounts { aiInferenceAdaptiveGroups(filter: {date_geq: \"2001-01-01\"})"
         " { count dimensions { datetimeMinute } } } } }", "buckets"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_too_much_is_told(served, query, says):
    answer = await served.call("POST", PATH, json={"query": query})
    assert answer.status_code == 200 and says in answer.json()["errors"][0]["message"], answer.text


@pytest.mark.parametrize(
    "body", [{}, {"query": ""}, {"query": 5}, {"query": "{ viewer { __typename } }", "variables": []}]
)
async def test_bodies_without_a_query(served, body):
    assert (await served.call("POST", PATH, json=body)).status_code == 400
