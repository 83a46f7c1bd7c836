"""What gateways count of settled work: live by the second, by the minute in the store, and over all gateways."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.api.types import Usage
from serve_app.gateway.history import HistoryRequest, usual_step
from serve_app.gateway.tally import LIVE_S, MAX_PAIRS, OTHERS, Tally
from serve_app.state.callers.accounts import Caller
from serve_app.state.kept.history import EVERYBODY, HOUR_S, MINUTE_S
from serve_app.tasks.work import Settled, Work
from tests.dashboard.test_session import Browser, a_key

T = 1_800_000_000 // HOUR_S * HOUR_S


def settled(account: str = "a", model: str = "m", status: Any = "done", tokens: int = 10, **more: Any) -> Settled:
    usage = Usage(prompt_tokens=20, cached_tokens=5, completion_tokens=tokens)
    return Settled(Caller(account), model, "text-generation", usage, status, "id", 1.0, **more)


def test_a_request_is_counted_once_whatever_it_was_seen_to_do_before():
    tally = Tally("g")
    model = SimpleNamespace(id="m")
    work = Work(Caller("a"), model, usage=Usage(completion_tokens=4))  # type: ignore[arg-type]
    tally.tick(0.0, T, [work])
    work.usage.completion_tokens = 7
    tally.tick(1.0, T + 1, [work])
    assert tally.live()[1]["a", "m"].of("completion_tokens") == 7
    tally(settled(work_id=id(work), ttft_s=0.2, itl_s=0.03))
    tally(settled(status="failed", tokens=0))
    tally(settled(status="refused", tokens=0))
    tally.tick(2.0, T + 2, [])
    numbers = tally.live()[1]["a", "m"]
    told = {name: numbers.of(name) for name in ("requests", "errors", "refusals", "completion_tokens", "cached_tokens")}
    assert told == {"requests": 3, "errors": 1, "refusals": 1, "completion_tokens": 10, "cached_tokens": 15}
    assert sum(numbers.buckets("ttft")) == sum(numbers.buckets("duration")) == 1
    # Ten seconds later it is over; since the start it is not.
    for second in range(LIVE_S):
        tally.tick(3.0 + second, T + 3 + second, [])
    assert tally.live() == (LIVE_S, {}) and tally.since_start["m"].of("requests") == 3


def test_minutes_and_hours_are_written_as_wholes():
    tally, rows = Tally("g"), []
    for second in range(0, 3 * MINUTE_S + 1, 20):
        tally(settled("ab"[second % 40 // 20]))
        rows += tally.tick(second, T + HOUR_S - MINUTE_S + second, [])
    minutes = {(r.at, r.account): r.numbers[0] for r in rows if r.width == MINUTE_S}
    hours = {(r.at, r.account): r.numbers[0] for r in rows if r.width == HOUR_S}
    assert [minutes[T + HOUR_S + at, EVERYBODY] for at in (-MINUTE_S, 0, MINUTE_S)] == [3, 3, 3]
    assert minutes[T + HOUR_S, "a"] + minutes[T + HOUR_S, "b"] == 3
    # What came in the second in which a minute ended belongs to the next one.
    assert hours[T, EVERYBODY] == 3 and hours[T + HOUR_S, EVERYBODY] == 6
    assert {r.gateway for r in rows} == {"g"}


def test_accounts_without_number_share_a_name():
    tally = Tally("g")
    for number in range(MAX_PAIRS + 50):
        tally(settled(f"account-{number}"))
    tally.tick(0.0, T, [])
    found = tally.live()[1]
    assert len(found) == MAX_PAIRS + 1 and found[OTHERS, "m"].of("requests") == 50


def test_steps_fit_what_is_kept():
    now = float(T)
    assert usual_step(T - 3600, T, now) == MINUTE_S
    assert usual_step(T - 86_400, T, now) == 300
    assert usual_step(T - 30 * 86_400, T, now) == 3 * HOUR_S
    assert usual_step(T - 3 * 86_400, T - 2 * 86_400, now) == HOUR_S
    assert HistoryRequest(0, 1, 300, None).width == MINUTE_S and HistoryRequest(0, 1, 7200, None).width == HOUR_S


async def test_two_gateways_add_up_to_what_was_done_and_one_that_is_killed_loses_a_minute(served):
    """Against the truth: every request that either of them has settled."""
    await served.start()
    tallies = [gateway.tally for gateway in served.gateways]
    histories = [gateway.history for gateway in served.gateways]
    now = int(time.time()) // MINUTE_S * MINUTE_S
    truth = {"team-a": 0, "team-b": 0}
    rows: list[Any] = []
    for minute in range(-3, 0):
        for at, tally in enumerate(tallies):
            for n in range(3 + at):
                account = ("team-a", "team-b")[n % 2]
                tally(settled(account, ttft_s=0.01 * n))
                truth[account] += 1
            rows += tally.tick(minute * 60.0, now + minute * MINUTE_S, [])
    # One ends in order, with its last minute; the other is killed, without.
    histories[0]._rows = rows
    histories[0].close()
    lost = {"team-a": 2, "team-b": 2}
    _, team = await a_key(served, ["read"], "team-a")
    operator, person = Browser(served), Browser(served)
    await operator.sign_in()
    await person.sign_in(team)

    async def requests(browser: Browser, query: str = "") -> int:
        answer = await browser.get(f"/v1/metrics/history?since=2h&{query}")
        assert answer.status_code == 200, answer.text
        return sum(point["requests"] for point in answer.json()["result"])

    assert await requests(operator) == sum(truth.values()) - sum(lost.values())
    for account in truth:
        assert await requests(operator, f"account={account}") == truth[account] - lost[account]
    by = (await operator.get("/v1/metrics/history?since=2h&group_by=account&step=7200")).json()["result"]
    assert {point["account"] for point in by} == set(truth)
    assert by[0]["ttft"]["p50"] is not None and by[0]["requests"]
    # Whoever is no operator sees the own account, and asks for no other.
    assert await requests(person) == truth["team-a"] - lost["team-a"]
    refused = await person.get("/v1/metrics/history?account=team-b")
    assert refused.status_code == 403 and "result" not in refused.text.replace('"result":null', "")
    assert (await person.get("/v1/metrics/now?account=local")).status_code == 403


async def test_now_is_of_all_gateways_and_of_the_own_account(served):
    await served.start()
    first, second = (gateway.history for gateway in served.gateways)

    async def both() -> list[bytes]:
        return [first.told(), second.told()]

    first.others = second.others = both
    for gateway, count in zip(served.gateways, (2, 3), strict=True):
        for account in ("team-a", "local"):
            for _ in range(count):
                gateway.tally(settled(account, "m1"))
        gateway.tally.tick(time.monotonic(), time.time(), [])
    _, team = await a_key(served, ["read"], "team-a")
    told = (await served.call("GET", "/v1/metrics/now")).json()
    assert (told["gateways"], told["requests"]) == (2, 10)
    assert told["tokens_per_s"] == pytest.approx(100 / told["seconds"], rel=1e-3)
    assert [each["model"] for each in told["by_model"]] == ["m1"]
    assert (await served.call("GET", "/v1/metrics/now", team)).json()["requests"] == 5

    async def away() -> list[bytes]:
        raise TimeoutError

    first.others = away
    assert (await served.call("GET", "/v1/metrics/now")).json()["gateways"] == 1


async def test_rows_wait_for_a_store_that_is_away(served):
    gateway = served.gateways[0]
    database, history = gateway.state.history._database, gateway.history
    transaction = database._transaction

    def lost(*_: Any, **__: Any) -> Any:
        from serve_app.state.errors import Away

        raise Away("the test took it away")

    gateway.tally(settled())
    gateway.tally.tick(0.0, T, [])
    history._rows = gateway.tally.tick(1.0, T + MINUTE_S, [])
    waits = len(history._rows)
    assert waits == 4
    database._transaction = lost
    await history._write()
    assert len(history._rows) == waits
    database._transaction = transaction
    await history._write()
    assert history._rows == [] and len(gateway.state.history.read(MINUTE_S, T, T + 1, "a")) == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_bad_questions_are_refused_with_a_reason(served):
    for query in ("since=yesterday", "step=7", "step=x", "group_by=key", "since=1h&until=2h", "since=400d&step=60"):
        answer = await served.call("GET", f"/v1/metrics/history?{query}")
        assert answer.status_code == 400 and len(answer.json()["errors"][0]["message"]) > 20, query
