"""A clock that is set an hour forward or back while requests run: the same answers, charged once."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.gateway.resume.conftest import CHAT, TEXT, Worker, looks
from tests.gateway.resume.test_idempotent import ASK, KEYED
from tests.gateway.resume.test_ledger import PATH, STREAM, charged
from tests.gateway.resume.test_resume import said

HOUR_S = 3600.0


@pytest.fixture
def jump(monkeypatch):
    """``jump(seconds)``: everybody's clock, but for the monotonic one."""
    clock, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: clock() + ahead[0])

    def by(seconds: float) -> None:
        ahead[0] += seconds

    return by


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
async def test_streams_go_on_wherever_they_are_and_are_charged_once(start, jump, monkeypatch, seconds):
    """Also one that nobody reads at the moment, and one whose gateway is taken for dead."""
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    asking = asyncio.ensure_future(one.http.post(PATH, json=STREAM))
    await worker.holds(1, one)
    [stream] = one.streams._running
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    jump(seconds)
    await looks(one, 3, monkeypatch)
    jump(-seconds)
    await looks(one, 3, monkeypatch)
    jump(seconds)
    worker.on.set()
    read = await other.http.get(f"/v1/requests/{stream}/stream")
    assert read.status_code == 200 and said(read.content) == TEXT and b"No client" not in read.content
    [entry] = charged(one, other)
    assert entry.status == "done" and entry.id == stream


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
async def test_a_key_is_charged_once_and_answered_with_what_there_was(start, jump, monkeypatch, seconds):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    first = asyncio.ensure_future(one.http.post(PATH, json=ASK, headers=KEYED))
    await worker.holds(1)
    jump(seconds)
    await looks(one, 2, monkeypatch)
    # Whether the first is still believed in or not, one answer counts.
    again = asyncio.ensure_future(other.http.post(PATH, json=ASK, headers=KEYED))
    await asyncio.wait({again}, timeout=0.2)
    jump(-seconds)
    worker.on.set()
    answers = [await first, await again]
    while answers[-1].status_code == 409:
        answers[-1] = await other.http.post(PATH, json=ASK, headers=KEYED)
    assert [a.json()["choices"][0]["message"]["content"] for a in answers] == [TEXT, TEXT]
    [entry] = charged(one, other)
    assert entry.id in {a.headers["cf-ray"] for a in answers}
    kept = await one.http.post(PATH, json=ASK, headers=KEYED)
    assert kept.headers["idempotent-replayed"] == "true" and kept.json()["model"] == CHAT
