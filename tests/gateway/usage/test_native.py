"""`GET .../ai/usage`: what was used, by time and by whatever is asked for, and who sees whose."""

from __future__ import annotations

import csv
import io

import pytest

from serve_app.gateway.usage.write import time_text
from serve_app.state.spending.ledger import DAY_S, HOUR_S
from tests.gateway.usage.conftest import CHAT, EMBED, START

PATH = "/client/v4/accounts/local/ai/usage"
TEAM = "/client/v4/accounts/team/ai/usage"
DAYS = {"since": time_text(START), "until": time_text(START + 3 * DAY_S)}


async def test_by_day(served):
    told = await served.get(PATH, **DAYS)
    assert told["success"] is True and told["result_info"]["total_count"] == 3
    first, second, third = told["result"]
    assert first == {
        "time": time_text(START),
        "requests": 3,
        "seconds": 1.5,
        "units": {"input_tokens": 300, "cached_tokens": 120, "output_tokens": 30},
        "neurons": 6.0,
        "cost": {"amount": "0.000066", "currency": "USD"},
    }
    assert second["units"]["input_tokens"] == 107 and second["neurons"] == 2.5
    assert third["cost"] == {"amount": "0.00002", "currency": "EUR"}
    assert (told["result_info"]["since"], told["result_info"]["until"]) == (DAYS["since"], DAYS["until"])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"interval": "none"}, [(5, 10.5 - 2.0), (1, 2.0)]),
        ({"interval": "none", "group_by": "model", "order": "-neurons"}, [(4, 8.0), (1, 2.0), (1, 0.5)]),
        ({"interval": "none", "group_by": "key,status"}, [(4, 6.5), (1, 2.0), (1, 2.0)]),
        ({"interval": "none", "model": EMBED}, [(1, 0.5)]),
        ({"interval": "none", "status": "left"}, [(1, 2.0)]),
        ({"interval": "none", "batch": "batch1"}, [(1, 2.0)]),
        ({"interval": "none", "key": "key1,key2", "task": "text-generation"}, [(4, 8.0), (1, 2.0)]),
        ({"interval": "hour", "until": time_text(START + 2 * HOUR_S)}, [(2, 4.0), (1, 2.0)]),
        ({"interval": "none", "until": time_text(START + HOUR_S - 1)}, [(1, 2.0)]),
        ({"interval": "none", "since": time_text(START + HOUR_S)}, [(3, 4.5), (1, 2.0)]),
        ({"interval": "none", "since": time_text(START + 3 * DAY_S), "until": "0d"}, []),
    ],
)
async def test_what_is_asked_for(served, query, expected):
    told = await served.get(PATH, **{**DAYS, **query})
    found = [(row["requests"], row["neurons"]) for row in told["result"]]
    assert sorted(found) == sorted(expected)
    if "order" in query:
        assert found == expected


async def test_pages_and_csv(served):
    query = {**DAYS, "group_by": "model", "interval": "none", "order": "-neurons"}
    whole = (await served.get(PATH, **query))["result"]
    for page, row in enumerate(whole, 1):
        told = await served.get(PATH, **query, page=page, per_page=1)
        assert told["result"] == [row] and told["result_info"]["count"] == 1
        assert told["result_info"]["total_count"] == len(whole) == 3
    assert (await served.get(PATH, **query, page=9, per_page=1))["result_info"]["total_count"] == 3
    answer = await served.call("GET", PATH, params={**query, "format": "csv"})
    assert answer.headers["content-type"].startswith("text/csv") and answer.headers["x-total-count"] == "3"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["model"] for row in rows] == [row["model"] for row in whole] == [CHAT, CHAT, EMBED]
    assert rows[0]["neurons"] == "8" and rows[0]["cost"] == "0.000088" and rows[0]["output_tokens"] == "40"
    assert rows[2]["output_tokens"] == "0" and rows[1]["currency"] == "EUR"


async def test_who_sees_whose(served):
    for key in ("team", "admin"):
        own = await served.get(TEAM, key, **DAYS, interval="none")
        assert [row["requests"] for row in own["result"]] == [2]
        for path, query in ((PATH, {}), (TEAM, {"account": "all"}), (TEAM, {"account": "local"})):
            refused = await served.call("GET", path, key, params={**DAYS, **query})
            assert refused.status_code == 403, refused.text
    assert (await served.call("GET", TEAM, "runs", params=DAYS)).status_code == 403
    # The operator's account sees each, and all together.
    assert (await served.get(TEAM, **DAYS, interval="none"))["result"][0]["requests"] == 2
    everybody = await served.get(PATH, **DAYS, interval="none", account="all", group_by="account")
    assert sorted((r["account"], r["requests"]) for r in everybody["result"]) == [
        ("local", 1),
        ("local", 5),
        ("team", 2),
    ]
    both = await served.get(PATH, **DAYS, interval="none", account="local,team")
    assert sorted(row["requests"] for row in both["result"]) == [1, 7]


async def test_receipts(served):
    told = (await served.get(PATH + "/request5"))["result"]
    assert told["id"] == "request5" and told["model"] == EMBED and told["units"] == {"input_tokens": 7}
    assert told["cost"] == {"amount": "0.0000055", "currency": "USD"} and told["neurons"] == 0.5
    assert told["time"].startswith(time_text(START + DAY_S + 5 * HOUR_S + 901)[:19]) and told["status"] == "done"
    assert (await served.get(TEAM + "/request7", "team"))["result"]["key"] == "key3"
    for path, key in ((TEAM + "/request1", "team"), (PATH + "/nothing", "operator")):
        answer = await served.call("GET", path, key)
        assert answer.status_code == 404 and answer.json()["errors"][0]["code"] == 5007


@pytest.mark.parametrize(
    "query",
    [
        {"interval": "week"},
        {"group_by": "colour"},
        {"group_by": "currency", "order": "-colour"},
        {"since": "yesterday"},
        {"since": "2020-01-01", "interval": "hour"},
        {"page": "0"},
        {"per_page": "1000000"},
        {"format": "xml"},
        {"interval": "day,hour"},
        {"model": "a\0b"},
    ],
)
async def test_what_is_wrong_is_told(served, query):
    answer = await served.call("GET", PATH, params=query)
    assert answer.status_code == 400 and answer.json()["errors"][0]["code"] == 5006, answer.text
