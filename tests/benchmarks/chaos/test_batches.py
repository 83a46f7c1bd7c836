"""Batches of the chaos run: what breaks it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from benchmarks.chaos import batches
from benchmarks.chaos.asks import asks
from benchmarks.chaos.batches import Batches, Line, Sent
from benchmarks.chaos.dialects import NATIVE, Seen
from benchmarks.chaos.weather import Weather
from serve_app.state.spending.ledger import Entry

USAGE = {"prompt_tokens": 3, "completion_tokens": 4}
ANSWER = {"choices": [{"index": 0, "message": {"content": "text"}}], "usage": USAGE}
WANTED = Seen(texts={"0": "text"}, usage=(3, 4))


@pytest.fixture
async def run(monkeypatch):
    monkeypatch.setattr(batches, "TAKEN_S", 0.5)
    monkeypatch.setattr(batches, "AGAIN_S", 0.01)
    answers: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        found = answers.pop(0) if answers else httpx.Response(503)
        if isinstance(found, Exception):
            raise found
        return found

    requests: list[httpx.Request] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here") as http:
        made = Batches(http, asks(), lambda number: WANTED, Weather())
        made.answers, made.requests = answers, requests
        yield made


def broke(run: Batches) -> list[str]:
    return [found["what"] for found in run._weather.broke]


def entry(request: str, units: tuple[int, int] = (3, 4), batch: str = "b", status: Any = "done") -> Entry:
    used = {"input_tokens": units[0], "output_tokens": units[1]}
    return Entry(request, "a", "k", time.time(), 0.1, "m", "t", status, used, 7, 5, "USD", batch=batch)


async def test_each_line_has_one_result_and_one_entry(run):
    run._sent = [Sent("workers-ai", "b", {"x": Line(0, [WANTED]), "y": Line(0, [WANTED]), "z": Line(0, refused=1)})]
    await run.finish()
    run.check([entry("r1"), entry("r2")], alone=True)
    run.check([entry("r1"), entry("r2"), entry("r9", batch="of others")], alone=False)
    assert not broke(run)
    wrong: list[tuple[list[Entry], str]] = [
        ([entry("r1")], "2 lines were answered and 1 are charged"),
        ([entry("r1"), entry("r2"), entry("r3")], "3 are charged"),
        ([entry("r1"), entry("r2", (3, 5))], "without entry"),
        ([entry("r1"), entry("r2", status="left")], "say"),
        ([entry("r1"), entry("r2"), entry("r9", batch="c")], "nobody has sent"),
    ]
    for entries, why in wrong:
        run._weather.broke.clear()
        run.check(entries, alone=True)
        assert [why in told for told in broke(run)] == [True], broke(run)


async def test_answers_that_tell_no_tokens_are_counted(run):
    labels = Seen(texts={"0": "circle"}, numbers=[0.9])
    run._sent = [Sent("workers-ai", "b", {"x": Line(0, [labels]), "y": Line(0, [labels])}, "path")]
    run.check([entry("r1"), entry("r2", (1, 0))], alone=True)
    assert not broke(run)
    run.check([entry("r1")], alone=True)
    assert "2 lines were answered and 1 are charged" in broke(run)[0]


async def test_a_line_without_a_result_and_one_with_two_break_the_run(run):
    run._sent = [Sent("queue", "q", {"x": Line(0), "y": Line(0, [WANTED, WANTED]), "z": Line(0, [WANTED], 1)})]
    await run.finish()
    assert len(broke(run)) == 3


async def test_results_are_held_to_the_text_and_errors_to_those_that_lost_workers_give(run):
    sent = Sent("workers-ai", "b", {name: Line(0) for name in "wxyz"})
    run._result(sent, "w", NATIVE.whole, {"result": ANSWER}, None)
    run._result(sent, "x", NATIVE.whole, None, [{"code": 3040, "message": "lost"}])
    assert not broke(run)
    other = {**ANSWER, "choices": [{"index": 0, "message": {"content": "other"}}]}
    run._result(sent, "y", NATIVE.whole, {"result": other}, None)
    run._result(sent, "z", NATIVE.whole, None, [{"code": 5006, "message": "bad"}])
    run._result(sent, "v", NATIVE.whole, {"result": ANSWER}, None)
    assert ["WRONG" in broke(run)[0], "5006" in broke(run)[1], "no line" in broke(run)[2]] == [True] * 3


async def test_a_submission_is_sent_again_under_one_key(run):
    run.answers += [httpx.ReadError("cut"), httpx.Response(503), httpx.Response(409, text="under way"),
                    httpx.Response(200, json={"result": {"request_id": "b"}})]  # fmt: skip
    await run._submit("workers-ai", {"x": Line(run._fits["workers-ai"][0])})
    assert len({request.headers["idempotency-key"] for request in run.requests}) == 1 and len(run.requests) == 4
    assert not broke(run)
    run.answers.append(httpx.Response(500, text="dishonest"))
    with pytest.raises(TimeoutError):
        await run._submit("workers-ai", {"x": Line(run._fits["workers-ai"][0])})
    assert "dishonest" in broke(run)[0]
