"""What runners of batches do, as gateways tell it: live, to Prometheus, in the status and at the command line."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from serve_app.api.types import Usage
from serve_app.cli.status import described
from serve_app.cli.top import rows
from serve_app.client.view import look
from serve_app.gateway import reports
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.attempts import MOST, WINDOW_S, Attempts
from serve_app.state.deferred.reports import COUNTED_S, FRESH_S
from serve_app.state.errors import Away
from serve_app.state.reader import ReadPool
from tests.gateway.http.test_accounts import CHAT, KEY, Served
from tests.waiting import until


async def test_a_runner_is_told_of_while_it_works_and_counted_a_while_longer(served: Served, monkeypatch):
    monkeypatch.setattr(reports, "EVERY_S", 0.01)
    runner = served.gateways[await served.start()]
    runner.reports.start()
    name = runner.tally.gateway
    model = runner.models.get(CHAT)
    here = served.gateways[0]

    async def ask(path: str) -> Any:
        answer = await served.call("GET", path)
        assert answer.status_code == 200
        return answer

    async def told(count: int) -> dict[str, Any] | None:
        found = (await ask("/v1/status")).json()
        return found if [one["running"] for one in found["runners"]] == [count] else None

    async with runner.runtime.work(model, Caller("local", key="k")) as work:
        work.usage = Usage(prompt_tokens=5, completion_tokens=3)
        found = await until(lambda: told(1))
        assert found["runners"][0]["runner"] == name and found["runners"][0]["models"] == {CHAT: 1}
        now = (await ask("/v1/metrics/now")).json()
        assert (now["gateways"], now["runners"], now["running"]) == (1, 1, 1)
        view = look(found)
        assert f"{name}  1 running: {CHAT} 1" in described(view, "x")
        assert rows(view)["runners"] == [["model", "batch runner", "running"], [CHAT, name, "1"]]
    # Its last report says that nothing is under way, and has what was done.
    await until(lambda: told(0))
    line = f'serve_app_requests_total{{gateway="{name}",model="{CHAT}",status="done"}} 1.0'
    assert line in (await ask("/metrics")).text
    # Then it rests, and is forgotten by and by.
    runner.reports.close()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + FRESH_S + 1)
    assert (await ask("/v1/status")).json()["runners"] == []
    assert line in (await ask("/metrics")).text
    monkeypatch.setattr(time, "time", lambda: clock() + COUNTED_S + 1)
    assert line not in (await ask("/metrics")).text
    assert await here.reports.counted() == []
    assert KEY not in (await ask("/metrics")).text


async def test_attempts_are_bounded_while_the_store_is_away() -> None:
    class Gone:
        def begin(self, *_: Any) -> Any:
            raise Away("of this test")

        forgive = trim = begin

    reader = ReadPool()
    attempts = Attempts(Gone(), reader)
    refused = 0
    for number in range(MOST + 3):
        try:
            await attempts.begin("a", 100.0)
        except Exception as error:
            assert number >= MOST and "wrong keys" in str(error)
            refused += 1
    assert refused == 3
    await attempts.begin("b", 100.0)
    await attempts.succeeded("b", 100.0)
    await attempts.begin("a", 100.0 + WINDOW_S)
    await asyncio.to_thread(reader.close)
