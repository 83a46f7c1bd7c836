"""Resumable streams while the store does not answer: a new one is refused, and who reads one waits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serve_app.gateway.resume import streams
from serve_app.state.errors import Away
from tests.gateway.resume.conftest import CHAT, TEXT, Worker
from tests.state.gateways import until

BODY = {"model": CHAT, "messages": [{"role": "user", "content": "Hi"}], "seed": 0, "stream": True}
RESUMES = {**BODY, "options": {"resumable": 60}}


def away(*_: Any) -> Any:
    raise Away("the test took it away")


async def test_a_stream_that_cannot_be_kept_is_refused_and_frees_its_place(start, monkeypatch):
    monkeypatch.setattr(streams, "AWAY_S", 0.1)
    worker = Worker(let=5)
    gateway = await start(worker)
    with monkeypatch.context() as patched:
        patched.setattr(gateway.state.streams, "write", away)
        answer = await gateway.http.post("/v1/chat/completions", json=RESUMES)
    # Its first tokens were there, and the next ones were being waited for.
    assert worker.held == 1
    assert answer.status_code == 503 and answer.json()["errors"][0]["code"] == 3040, answer.text
    assert int(answer.headers["retry-after"]) > 0
    await until(lambda: not any(model.inflight for model in gateway.models))
    assert [settled.status for settled in gateway.settled] == ["left"]


async def test_who_reads_a_stream_of_another_gateway_waits_for_the_store(start, monkeypatch):
    worker = Worker(let=5)
    one, other = await start(worker), await start(worker)
    running = asyncio.ensure_future(one.http.post("/v1/chat/completions", json=RESUMES))
    await worker.holds(1, one)
    [stream] = one.streams._running.values()
    looked = 0
    shown = other.state.streams.shown

    def sometimes(*args: Any) -> Any:
        nonlocal looked
        looked += 1
        return shown(*args) if looked in (1, 2) or looked > 5 else away()

    monkeypatch.setattr(other.state.streams, "shown", sometimes)
    reading = asyncio.ensure_future(other.http.get(f"/v1/requests/{stream.id}/stream"))
    await until(lambda: looked > 5)
    worker.on.set()
    read, ran = await reading, await running
    assert read.status_code == 200 and read.text == ran.text
    told = [json.loads(line[6:]) for line in read.text.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in told if one["choices"]) == TEXT
