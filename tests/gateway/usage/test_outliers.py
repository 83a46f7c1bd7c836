"""`GET .../ai/usage/outliers`: days above an account's own 95th percentile, compared with numpy's."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from serve_app.gateway.usage.outliers import outliers, quantile
from serve_app.gateway.usage.write import time_text
from serve_app.state.spending.ledger import DAY_S
from serve_app.state.spending.usage import UsageRow
from tests.gateway.usage.conftest import Served, entry

PATH, TEAM = "/client/v4/accounts/local/ai/usage/outliers", "/client/v4/accounts/team/ai/usage/outliers"


def test_the_percentile_is_numpys():
    chosen = random.Random(5)
    for length in (1, 2, 7, 30):
        found = [chosen.randrange(1000) for _ in range(length)]
        for share in (0.0, 0.5, 0.95, 1.0):
            assert quantile(found, share) == pytest.approx(np.quantile(found, share))


def test_days_are_compared_with_the_thirty_before_each_with_its_own():
    rows = []

    def use(account: str, day: int, neurons: int) -> None:
        rows.append(UsageRow(day * DAY_S, {"account": account, "model": "m"}, 1, 1.0, {}, neurons, 0))

    for day in range(37):
        use("large", day, 1000)
        use("small", day, 10)
    use("small", 36, 90)  # together 100, far below what the other uses each day
    use("large", 33, 1)
    use("new", 36, 10**9)  # with nothing to compare it with
    found = outliers(rows, "model", 30 * DAY_S, 36 * DAY_S)
    told = {(one.account, one.at // DAY_S): (one.neurons, one.usual) for one in found}
    assert told == {("small", 36): (100, 10), ("large", 33): (1001, 1000)}
    # A day before those asked for is not told of, and counts among the thirty.
    assert outliers(rows, "model", 34 * DAY_S, 36 * DAY_S) == [one for one in found if one.account == "small"]


async def test_over_http(served: Served):
    today = int(time.time()) // DAY_S * DAY_S
    start = (int(time.time()) // DAY_S - 5) * DAY_S
    days = [today - number * DAY_S - start for number in range(37)]
    rows = [entry(1000 + n, day + 60, key="steady", model="@cf/a/b") for n, day in enumerate(days)]
    rows += [entry(2000 + n, days[2] + 90, key="steady", model="@cf/a/b") for n in range(4)]
    rows += [entry(3000 + n, day + 60, "team", key="other", model="@cf/a/b") for n, day in enumerate(days)]
    served.gateway.state._store.write([made.row() for made in rows])
    told = await served.get(PATH)
    steady = [one for one in told["result"] if one["name"] in ("steady", "@cf/a/b")]
    assert [(one["group"], one["neurons"], one["usual"], one["ratio"]) for one in steady] == [
        ("key", 10.0, 2.0, 5.0),
        ("model", 10.0, 2.0, 5.0),
    ]
    assert {one["time"] for one in steady} == {time_text(today - 2 * DAY_S)}
    assert {one["account"] for one in told["result"]} == {"local"}
    assert told["result_info"]["share"] == 0.95
    every = (await served.get(PATH, account="all", group_by="model"))["result"]
    # Of the other account nothing stands out, though together they use more.
    assert [one["account"] for one in every if one["name"] == "@cf/a/b"] == ["local"]
    assert (await served.get(PATH, days=2))["result"] == []
    assert (await served.get(TEAM, "team"))["result"] == []
    assert (await served.call("GET", PATH, "team")).status_code == 403
    assert (await served.call("GET", TEAM, "team", params={"account": "all"})).status_code == 403
    for query in ({"days": 0}, {"days": 61}, {"group_by": "colour"}, {"days": "x"}):
        assert (await served.call("GET", PATH, params=query)).status_code == 400
