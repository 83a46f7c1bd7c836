"""Resumable streams while the store does not answer: a new one is refused, and who reads one waits."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from serve_app.gateway.resume import streams
from serve_app.gateway.resume.log import StreamLog
from serve_app.state.errors import Away
from serve_app.state.kept.streams import Head
from tests.gateway.resume.conftest import CHAT, TEXT, Worker, looks
from tests.gateway.resume.test_ledger import charged
from tests.state.gateways import until
from tests.variants import some


async def never(*_: Any) -> None:
    """Whoever takes no streams over."""


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


@pytest.mark.parametrize("let", some([5, 10_000], 5))
async def test_what_was_refused_is_run_by_nobody_though_the_store_takes_it(start, monkeypatch, let):
    """The write was under way when its client was refused, and comes to the store then. ``let``: has it ended?"""
    monkeypatch.setattr(streams, "AWAY_S", 0.1)
    monkeypatch.setattr(streams, "LEASE_S", 0.05)
    worker, through = Worker(let=let), threading.Event()
    one, other = await start(worker), await start(worker)
    write, asked, wrote = one.state.streams.write, [], []

    def late(owner: str, parts: Any, *more: Any) -> Any:
        asked.extend(parts)
        through.wait(60)
        refused = write(owner, parts, *more)
        wrote.extend(parts)
        return refused

    monkeypatch.setattr(one.state.streams, "write", late)
    refused = []
    while not asked:  # on a busy machine one may be refused before it is given to the store
        answer = await one.http.post("/v1/chat/completions", json=RESUMES)
        assert answer.status_code == 503
        refused.append(answer.headers["cf-ray"])
    assert asked[0].id in refused
    through.set()
    await until(lambda: wrote)
    for gateway in (one, other):
        await looks(gateway, 3, monkeypatch)
    worker.on.set()
    await until(lambda: one.state.streams.shown("local", asked[0].id, 0).status == "expired")
    assert len(worker.calls) <= len(refused) and charged(one, other) == []


async def test_nobody_goes_on_with_it_before_the_store_hears_of_the_refusal(start, monkeypatch):
    """The store is slow between what it takes and what it is told next."""
    monkeypatch.setattr(streams, "AWAY_S", 0.1)
    monkeypatch.setattr(streams, "LEASE_S", 0.05)
    worker, through, told = Worker(let=5), threading.Event(), threading.Event()
    one, other = await start(worker), await start(worker)
    write, refuse, asked, wrote = one.state.streams.write, one.state.streams.refuse, [], []

    def late(owner: str, parts: Any, *more: Any) -> Any:
        asked.extend(parts)
        through.wait(60)
        lost = write(owner, parts, *more)
        wrote.extend(parts)
        return lost

    def later(*args: Any) -> None:
        if wrote:
            told.wait(60)
        refuse(*args)

    monkeypatch.setattr(one.state.streams, "write", late)
    monkeypatch.setattr(one.state.streams, "refuse", later)
    refused = []
    while not asked:
        refused.append((await one.http.post("/v1/chat/completions", json=RESUMES)).headers["cf-ray"])
    assert asked[0].id in refused
    through.set()
    await until(lambda: wrote)
    await looks(other, 3, monkeypatch)
    told.set()
    assert len(worker.calls) <= len(refused)
    assert one.state.streams.shown("local", asked[0].id, 0).status == "expired"


async def test_a_gateway_that_stood_still_hears_what_the_store_has_said_meanwhile(start, monkeypatch):
    """As one that was stopped by a signal: all that it has waited for is overdue when it goes on."""
    monkeypatch.setattr(streams, "AWAY_S", 0.5)
    gateway = await start(Worker())
    write, loop = gateway.state.streams.write, asyncio.get_running_loop()

    def stops(owner: str, parts: Any, *more: Any) -> Any:
        refused = write(owner, parts, *more)
        if any(part.head is not None for part in parts):
            loop.call_soon_threadsafe(time.sleep, 1.0)
        return refused

    monkeypatch.setattr(gateway.state.streams, "write", stops)
    answer = await gateway.http.post("/v1/chat/completions", json=RESUMES)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    await until(lambda: len(charged(gateway)) == 1)


async def test_what_another_gateway_has_ended_by_then_is_shown_and_not_refused(start, monkeypatch):
    """It is charged there, and its client would send it again."""
    monkeypatch.setattr(streams, "AWAY_S", 0.5)
    monkeypatch.setattr(streams, "LEASE_S", 0.05)
    worker, through = Worker(let=5), threading.Event()
    one, other = await start(worker), await start(worker)
    write, refuse = one.state.streams.write, one.state.streams.refuse

    def unheard(owner: str, parts: Any, *more: Any) -> Any:
        refused = write(owner, parts, *more)
        worker.on.set()
        through.wait(60)
        return refused

    def behind(*args: Any) -> Any:
        until_now = time.monotonic() + 60
        while not charged(other) and time.monotonic() < until_now:
            time.sleep(0.01)
        return refuse(*args)

    monkeypatch.setattr(one.state.streams, "write", unheard)
    monkeypatch.setattr(one.state.streams, "refuse", behind)
    # Who asks the store has the patience that the test needs.
    monkeypatch.setattr(one.streams, "look", asyncio.to_thread)
    answer = await one.http.post("/v1/chat/completions", json=RESUMES)
    through.set()
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    assert len(charged(one, other)) == 1


async def test_what_another_gateway_runs_by_then_is_shown_and_not_refused(start, monkeypatch):
    """The first write came to the store, and its answer to nobody."""
    monkeypatch.setattr(streams, "LEASE_S", 0.05)
    worker, tries = Worker(let=5), []
    one, other = await start(worker), await start(worker)
    write = one.state.streams.write

    def unheard(owner: str, parts: Any, *more: Any) -> Any:
        tries.append(owner)
        if len(tries) == 1:
            write(owner, parts, *more)
            raise Away("its answer was lost")
        end = time.monotonic() + 60
        while not other.streams._running and time.monotonic() < end:
            time.sleep(0.01)
        worker.on.set()
        return write(owner, parts, *more)

    monkeypatch.setattr(one.state.streams, "write", unheard)
    monkeypatch.setattr(one.streams, "_take_over", never)
    answer = await one.http.post("/v1/chat/completions", json=RESUMES)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    await until(lambda: len(charged(one, other)) == 1)


def test_the_end_of_a_stream_comes_behind_what_it_was_begun_with():
    """Until the store knows of it its client may be refused, and is not to be charged."""
    stream = StreamLog(Head("s", "a", 1.0, 60.0, b"request"))
    stream.append(b"data: 1\n\n")
    stream.entries.append({"id": "s"})
    stream.end("done")
    first = stream.take(9.0)
    assert first.head is not None and (first.frames, first.upto, first.ending, first.entries) == (b"", 0, None, ())
    stream.stored(first)
    assert not stream.safe and not stream.complete
    last = stream.take(9.0)
    assert (last.head, last.number, last.upto, last.ending, last.entries) == (None, 2, 1, "done", ({"id": "s"},))
    stream.stored(last)
    assert stream.safe == 1 and stream.complete and stream.take(9.0) is None
    # Another gateway could go on from the first part as well.
    assert StreamLog(stream.head, 2, [(first.frames, first.trail)]).frames == []


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
