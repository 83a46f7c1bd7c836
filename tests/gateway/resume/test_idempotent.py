"""A request that is sent again under its `Idempotency-Key` is done once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve_app.gateway.resume import keys
from serve_app.state.errors import Away
from tests.gateway.resume.conftest import CHAT, TEXT, Worker
from tests.state.gateways import until

ASK = {"model": CHAT, "messages": [{"role": "user", "content": "hi"}], "seed": 0}
KEYED = {"Idempotency-Key": "order 66"}


async def test_a_request_sent_again_is_answered_with_what_there_was(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    path = "/v1/chat/completions"
    first = asyncio.ensure_future(one.http.post(path, json=ASK, headers=KEYED))
    await worker.holds(1)
    for gateway in (one, other):
        early = await gateway.http.post(path, json=ASK, headers=KEYED)
        assert (
            early.status_code == 409
            and early.headers["retry-after"]
            and "under way" in early.json()["error"]["message"]
        )
    worker.on.set()
    answer = await first
    assert answer.json()["choices"][0]["message"]["content"] == TEXT and "idempotent-replayed" not in answer.headers
    for gateway in (one, other):
        again = await gateway.http.post(path, json=ASK, headers=KEYED)
        assert again.status_code == 200 and again.content == answer.content
        assert again.headers["idempotent-replayed"] == "true" and again.headers["content-type"] == "application/json"
    assert len(worker.calls) == len(one.settled) == 1 and not other.settled
    # Another body, and the same body on another route, are other requests.
    for where, body in ((path, {**ASK, "seed": 1}), (f"/client/v4/accounts/local/ai/run/{CHAT}", ASK)):
        other_body = await other.http.post(where, json=body, headers=KEYED)
        assert other_body.status_code == 422 and "new key" in other_body.text


async def test_what_failed_or_lost_its_gateway_may_be_sent_again(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    path = "/v1/chat/completions"
    bad = await one.http.post(path, json={**ASK, "temperature": "hot"}, headers=KEYED)
    assert bad.status_code == 400
    first = asyncio.ensure_future(one.http.post(path, json=ASK, headers=KEYED))
    await worker.holds(1)
    await one.kill()
    one.streams._release()
    sending = asyncio.ensure_future(other.http.post(path, json=ASK, headers=KEYED))
    await worker.holds(2)
    worker.on.set()
    again = await sending
    assert again.status_code == 200 and "idempotent-replayed" not in again.headers
    # What the dead one had to say changes nothing.
    await first
    kept = await other.http.post(path, json=ASK, headers=KEYED)
    assert kept.content == again.content and len(worker.calls) == 2
    assert (await other.http.post(path, json=ASK, headers={"Idempotency-Key": "x" * 256})).status_code == 400


async def test_a_resumable_stream_sent_again_is_the_same_stream(start):
    gateway = await start(Worker())
    ask = {**ASK, "stream": True, "options": {"resumable": 60}}
    first = await gateway.http.post("/v1/chat/completions", json=ask, headers=KEYED)
    again = await gateway.http.post("/v1/chat/completions", json=ask, headers=KEYED)
    assert again.content == first.content and len(gateway.settled) == 1


@pytest.mark.parametrize("lost", ["free", "keep"])
async def test_a_key_whose_end_the_store_did_not_take_is_not_held_for_ever(start, monkeypatch, lost):
    """The disk was full, say. The key is free, or has its answer, once the store is back."""
    monkeypatch.setattr(keys, "AGAIN_S", 0.02)
    worker = Worker()
    gateway = await start(worker)
    path, away = "/v1/chat/completions", True
    right = getattr(gateway.state.answers, lost)

    def sometimes(*args):
        if away:
            raise Away("the test took it away")
        return right(*args)

    monkeypatch.setattr(gateway.state.answers, lost, sometimes)
    ask = ASK if lost == "keep" else {**ASK, "temperature": "hot"}
    first = await gateway.http.post(path, json=ask, headers=KEYED)
    assert first.status_code == (200 if lost == "keep" else 400)
    assert (await gateway.http.post(path, json=ask, headers=KEYED)).status_code == 409
    away = False
    await until(lambda: not gateway.keys.waiting)
    again = await gateway.http.post(path, json=ask, headers=KEYED)
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert len(worker.calls) == (lost == "keep") == gateway.state.ledger.written


async def test_a_claim_that_the_store_took_too_late_holds_no_key(start, monkeypatch):
    monkeypatch.setattr(keys, "AGAIN_S", 0.02)
    gateway = await start(Worker())
    path, claim, goes_on = "/v1/chat/completions", gateway.state.answers.claim, threading.Event()

    def slowly(*args):
        goes_on.wait(60)
        return claim(*args)

    with monkeypatch.context() as patched:
        patched.setattr(keys, "AWAY_S", 0.05)
        patched.setattr(gateway.state.answers, "claim", slowly)
        early = await gateway.http.post(path, json=ASK, headers=KEYED)
        assert early.status_code == 503 and early.headers["retry-after"]
    goes_on.set()
    async with asyncio.timeout(60):
        while (again := await gateway.http.post(path, json=ASK, headers=KEYED)).status_code != 200:
            assert again.status_code == 409
            await asyncio.sleep(0.02)
    assert "idempotent-replayed" not in again.headers
