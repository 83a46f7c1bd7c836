"""Every figure of a page is the API's."""

from __future__ import annotations

import json
import re
from datetime import datetime
from decimal import Decimal

import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.dashboard.test_dashboard import text


def test_figures_of_live_pages_are_those_of_the_answers_they_come_from(tab, http):
    """What the server told last is held, so that nothing moves between the two looks."""
    page, kept = tab.page, {}
    http.post(f"/run/{CHAT}", json={"prompt": "What does math.cos do?", "max_tokens": 8})

    def hold(route) -> None:
        path = route.request.url
        if path not in kept:
            kept[path] = route.fetch()
        route.fulfill(response=kept[path])

    def told(part: str) -> dict:
        return next(answer.json() for path, answer in kept.items() if part in path)

    def formatted(name: str, value: object) -> str:
        """By the page's own words for a number."""
        return page.evaluate(
            """async ([name, value]) => {
                const source = document.querySelector("script[type=module]").src;
                return (await import(source.replace(/main\\.js$/, "core/format.js")))[name](value);
            }""",
            [name, value],
        )

    for path in ("**/v1/metrics/now", "**/v1/cluster", "**/ai/usage?*"):
        page.route(path, hold)
    tab.open("#/overview")
    page.get_by_role("group", name="Neurons today", exact=True).wait_for()
    page.get_by_role("group", name="Requests", exact=True).wait_for()
    now = told("/metrics/now")
    assert text(tab, "Requests") == formatted("rate", now["requests_per_s"]) + "/s"
    assert text(tab, "Tokens") == formatted("rate", now["tokens_per_s"]) + "/s"
    assert text(tab, "Time to first token") == formatted("seconds", now["ttft"]["p50"])
    assert text(tab, "Between tokens") == formatted("seconds", now["itl"]["p50"])
    assert text(tab, "Errors") == formatted("count", now["errors"])
    # The sums of the day are those since later than the month's.
    day = kept[max(path for path in kept if "/ai/usage?since=" in path)].json()["result"]
    assert text(tab, "Neurons today") == formatted("neurons", round(sum(row["neurons"] for row in day), 6))
    units = [row["units"].get(name, 0) for row in day for name in ("input_tokens", "output_tokens")]
    assert text(tab, "Tokens today") == formatted("count", sum(units))
    amount = sum(Decimal(row["cost"]["amount"]) for row in day if row.get("cost"))
    assert Decimal(text(tab, "Money today").lstrip("$")) == amount

    tab.open("#/cluster")
    page.get_by_role("group", name="Models ready", exact=True).wait_for()
    models = told("/v1/cluster")["models"]
    assert text(tab, "Models ready") == f"{sum(one['ready'] for one in models)} of {len(models)}"
    assert text(tab, "Workers") == str(sum(len(one.get("workers", [])) for one in models))
    assert text(tab, "In flight") == str(sum(one.get("inflight", 0) for one in models))


@pytest.mark.slow
def test_workers_of_a_stage_are_told_apart(tab, http, stack):
    """The answer of this server, as it would be with two workers that decode."""
    told = http.get(f"{stack.url}/v1/cluster").json()
    [model] = [one for one in told["models"] if one["model"] == CHAT]
    seen = next(one for one in model["routing"]["workers"] if one["stage"] == "decode")
    counted = next(one for one in model["workers"] if one["stage"] == "decode")
    assert counted["replica"] == seen["replica"]
    model["routing"]["workers"].append(seen | {"replica": "another", "role": "prefill", "step_ms": 12.5})
    model["workers"].append(counted | {"replica": "another", "pid": 1, "running": 7})
    tab.page.route("**/v1/cluster", lambda route: route.fulfill(json=told))
    tab.open("#/cluster")
    card = tab.page.locator("section.card").filter(
        has=tab.page.get_by_role("link", name="pico/pico-instruct", exact=True)
    )
    rows = card.get_by_role("region", name="Workers", exact=True).locator("tbody tr")
    rows.first.wait_for()
    found = {row[1]: row for row in (one.get_by_role("cell").all_inner_texts() for one in rows.all())}
    assert found["another"][0].split("\n")[-1].endswith("works as prefill") and found["another"][2] == "7"
    assert found["another"][4] == "13 ms"
    assert found[seen["replica"]][2] == str(counted["running"]) and "prefill" not in found[seen["replica"]][0]


@pytest.mark.slow
def test_days_are_those_of_the_ledger_wherever_one_looks_from(new_tab, signed_in, http):
    http.post(f"/run/{CHAT}", json={"prompt": "What does math.cos do?", "max_tokens": 8})
    tab = new_tab(storage_state=signed_in, timezone_id="America/Los_Angeles")
    tab.open("#/usage?range=7d&by=time&show=requests&accounts=own")
    table = tab.page.get_by_role("region", name="Usage by day", exact=True)
    table.wait_for()
    shown = {int(row.get_by_role("cell").first.inner_text().split()[0]) for row in table.locator("tbody tr").all()}
    rows = http.get("/usage", params={"since": "7d", "interval": "day"}).json()["result"]
    assert shown == {datetime.fromisoformat(row["time"]).day for row in rows}


@pytest.mark.slow
def test_prices_and_limits_of_a_model_are_the_catalogues(tab, http):
    [model] = [one for one in http.get("/models/search?per_page=1000").json()["result"] if one["name"] == CHAT]
    prices = next(one["value"] for one in model["properties"] if one["property_id"] == "price")
    tab.open(f"#/models/{CHAT}")
    table = tab.page.get_by_role("region", name="Prices", exact=True)
    table.wait_for()
    for price in prices:
        unit, money, neurons = table.get_by_role("row", name=price["unit"]).get_by_role("cell").all_inner_texts()
        assert unit == price["unit"] and float(money.lstrip("$")) == price["price"]
        assert float(neurons.replace(",", "")) == price["neurons"]
    schema = http.get("/models/schema", params={"model": CHAT}).json()["result"]["input"]
    fields = {name: about for one in schema["oneOf"] for name, about in one["properties"].items()}
    limits = tab.page.get_by_role("region", name="Limits", exact=True)
    for name in ("temperature", "max_tokens", "top_k"):
        row = limits.get_by_role("row", name=re.compile(rf"^{name}\b"))
        bounds = row.get_by_role("cell").nth(1).inner_text().replace(",", "")
        low, high = fields[name]["minimum"], fields[name]["maximum"]
        # What only a number's type bounds is no limit.
        assert [float(part) for part in re.findall(r"[\d.]+", bounds)] == [low] + [high] * (high < 2**31 - 1)


@pytest.mark.slow
def test_what_a_batch_took_is_the_batchs(tab, http):
    asked = [{"prompt": f"What does math.{name} do?", "max_tokens": 4} for name in ("sin", "tan", "exp")]
    made = http.post(
        "/batches",
        params={"model": CHAT},
        content="\n".join(map(json.dumps, asked)),
        headers={"Content-Type": "application/jsonl"},
    ).json()["result"]
    tab.open("#/batches")
    row = tab.page.get_by_role("row", name=re.compile(made["id"][:12]))
    row.get_by_text("completed", exact=True).wait_for()
    told = http.get(f"/batches/{made['id']}").json()["result"]
    cells = row.get_by_role("cell").all_inner_texts()
    assert cells[2].startswith(f"{told['progress']['done']} of {told['requests']['total']}")
    assert Decimal(cells[3]) == round(Decimal(str(told["neurons"])), 6)
    assert Decimal(cells[4].lstrip("$")) == Decimal(told["cost"]["amount"])


@pytest.mark.slow
def test_decisions_are_the_apis(tab, http):
    page = tab.page
    tab.open(f"#/playground?model={CHAT}")
    page.get_by_role("button", name="Decisions", exact=True).click()
    page.get_by_label("Name", exact=True).nth(2).wait_for()
    page.get_by_role("button", name="Remove the question anger", exact=True).click()
    page.get_by_role("button", name="Decide", exact=True).click()
    found = page.get_by_role("region", name="Answers", exact=True)
    found.wait_for()
    shown = {
        name: [
            float(one) for one in found.get_by_role("list", name=name, exact=True).locator("strong").all_inner_texts()
        ]
        for name in ("urgent", "team")
    }
    asked = {
        "state": page.get_by_label("Text", exact=True).input_value(),
        "questions": {
            "urgent": {"type": "noul", "instructions": "Does it have to be answered today?"},
            "team": {
                "type": "choice",
                "instructions": "Whose is it?",
                "criteria": {
                    "billing": "payments, invoices",
                    "support": "things that do not work",
                    "other": None,
                },
            },
        },
    }
    told = http.post(f"/run/{CHAT}", json=asked).json()["result"]["answers"]
    yes = told["urgent"]["noul"]
    # A prompt that is in the cache is summed up in another order.
    assert shown["urgent"] == [pytest.approx(yes, abs=2e-4), pytest.approx(1 - yes, abs=2e-4)]
    assert shown["team"] == [pytest.approx(one, abs=2e-4) for one in told["team"]["probabilities"].values()]
