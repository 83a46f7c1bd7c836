"""Requests that several gateways may run are charged once, with the answer that counts."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from serve_app.state.errors import Away
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.tables import ledger
from tests.gateway.resume.conftest import CHAT, Worker
from tests.gateway.resume.test_idempotent import ASK, KEYED
from tests.waiting import until

PATH = "/v1/chat/completions"
STREAM = {**ASK, "stream": True, "stream_options": {"include_usage": True}, "options": {"resumable": 60}}


def charged(*gateways) -> list[Entry]:
    """Once everything that waits has reached the store."""
    for gateway in gateways:
        gateway.state.ledger.flush()
    with gateways[0].state._store.database.reading() as connection:
        return [Entry.of(row) for row in connection.execute(sa.select(ledger).order_by(ledger.c.at)).mappings()]


async def test_a_stream_is_charged_with_its_end(start, monkeypatch):
    """In one transaction: when the store has the end it has the entry, whatever becomes of the gateway then."""
    gateway = await start(Worker())
    at_end = []
    write = gateway.state.streams.write

    def watched(owner, parts, *more):
        refused = write(owner, parts, *more)
        if any(part.ending for part in parts):
            at_end.extend(charged(gateway))
        return refused

    monkeypatch.setattr(gateway.state.streams, "write", watched)
    answer = await gateway.http.post(PATH, json=STREAM)
    [entry] = at_end
    assert entry.status == "done" and entry.id == answer.headers["cf-ray"]
    assert f'"neurons":{entry.neurons / 10**6}' in answer.text.replace(" ", "")
    assert gateway.state.ledger.written == 0 and charged(gateway) == [entry]


async def test_a_stream_that_is_taken_over_is_charged_once(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    asking = asyncio.ensure_future(one.http.post(PATH, json=STREAM))
    await worker.holds(1, one)
    await one.kill()
    worker.on.set()
    await until(lambda: other.settled)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    [entry] = charged(one, other)
    assert entry.status == "done" and entry.units["output_tokens"] == other.settled[0].usage.completion_tokens


async def test_an_answer_by_its_key_is_charged_once(start):
    one, other = await start(Worker()), await start(Worker())
    first = await one.http.post(PATH, json=ASK, headers=KEYED)
    again = await other.http.post(PATH, json=ASK, headers=KEYED)
    assert again.content == first.content
    [entry] = charged(one, other)
    assert entry.neurons / 10**6 == first.json()["usage"]["neurons"] and entry.id == first.headers["cf-ray"]
    # With the answer, not beside it: no moment has the one without the other.
    assert one.state.ledger.written == other.state.ledger.written == 0


async def test_a_key_whose_gateway_was_slow_is_charged_for_one_answer(start):
    worker = Worker(let=9)
    one, other = await start(worker), await start(worker)
    first = asyncio.ensure_future(one.http.post(PATH, json=ASK, headers=KEYED))
    await worker.holds(1)
    await one.kill()
    # The key is the other's from here on, whichever of the two is done first.
    sending = asyncio.ensure_future(other.http.post(PATH, json=ASK, headers=KEYED))
    await worker.holds(2)
    worker.on.set()
    again = await sending
    assert again.status_code == 200 and (await first).status_code == 200
    [entry] = charged(one, other)
    assert entry.id == again.headers["cf-ray"]


async def test_an_answer_that_cannot_be_kept_is_charged_all_the_same(start, monkeypatch):
    gateway = await start(Worker())

    def away(*_):
        raise Away("the test took it away")

    monkeypatch.setattr(gateway.state.answers, "keep", away)
    answer = await gateway.http.post(PATH, json=ASK, headers=KEYED)
    assert answer.status_code == 200
    [entry] = charged(gateway)
    assert entry.id == answer.headers["cf-ray"] and gateway.state.ledger.written == 1


@pytest.mark.parametrize("resumable", [{}, {"options": {"resumable": 60}}])
async def test_engine_tokens_of_a_stream_are_charged_as_they_are_taken(start, resumable):
    """A client that leaves after some frames pays for these, and for what was on its way to it at most."""
    worker = Worker(let=9)
    gateway = await start(worker)
    [model] = [model for model in gateway.models if model.id == CHAT]
    if resumable:
        asking = asyncio.ensure_future(gateway.http.post(PATH, json={**STREAM, **resumable}))
        await worker.holds(1, gateway)
        [stream] = gateway.streams._running
        ended = await gateway.http.post(f"/v1/requests/{stream}/cancel")
        assert ended.status_code == 200, ended.text
        await asking
    else:
        body = {**STREAM, "options": {}}
        asking = asyncio.ensure_future(gateway.http.post(PATH, json=body))
        await worker.holds(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: gateway.settled and charged(gateway))
    [entry] = charged(gateway)
    assert entry.status == "left" and 0 < entry.units["output_tokens"] <= 9
    assert entry.units["input_tokens"] == gateway.settled[0].usage.prompt_tokens
