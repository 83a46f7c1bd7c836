"""With an account goes everything that was kept of it, also what is on its way to the store at that moment."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from serve_app.state.kept.history import EVERYBODY, MINUTE_S, HistoryRow, Numbers
from serve_app.state.kept.streams import Head, KeyClaim, StreamPart
from serve_app.state.kept.traces import TraceQuery
from serve_app.state.protocols import Row
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.sql import SqlStore
from tests.state.gateways import Gateways
from tests.state.kept.test_streams import part

THEIRS = "theirs"


def trace(request_id: str, ended: float, ms: float = 1.0, account: str = THEIRS) -> Row:
    columns = {"account": account, "id": request_id, "ended": ended, "body": b"{}"}
    columns |= {"model": "m", "status": "done", "ms": ms}
    return Row("trace", (account, request_id), columns, 2)


def response(response_id: str, asked: float, created: float, account: str = THEIRS) -> Row:
    body = orjson.dumps({"id": response_id, "created_at": int(asked)})
    columns = {"id": response_id, "account": account, "created": created, "previous": None, "size": 4}
    return Row("response", (account, response_id), {**columns, "turn": b"[]", "body": body}, 4)


def items(conversation_id: str) -> Row:
    columns = {"account": THEIRS, "conversation": conversation_id, "items": [("item", b"{}")]}
    return Row("conversation", (THEIRS, conversation_id, "r"), columns, 2)


def entry(entry_id: str) -> Row:
    return Entry(entry_id, THEIRS, "key", time.time(), 1.0, "m", "chat", "done", {"requests": 1}, 5, 0, "USD").row()


def again(store: SqlStore) -> float:
    """The account is removed, and another gets its name; when."""
    store.accounts.remove(THEIRS)
    removed = time.time()
    store.accounts.create(THEIRS)
    return removed


@pytest.fixture
def kept(store: SqlStore) -> SqlStore:
    """A store in which two accounts have something of each kind."""
    now = time.time()
    for account in (THEIRS, "other"):
        store.accounts.create(account)
        name = account[0]
        store.write([trace(f"{name}-r", now, account=account), response(f"{name}-resp", now, now, account)])
        store.conversations.create(account, f"{name}-conv", b"{}")
        store.conversations.add(account, f"{name}-conv", [("item", b"{}")])
        claim = KeyClaim("gateway", account, "key", now)
        assert store.answers.claim(claim, now + 60.0, "print") is None and store.answers.keep(claim, b"answer")
        head = Head(f"{name}-stream", account, now, 600.0, b"request")
        ended = StreamPart(head.id, 1, 1, 1, b"frame", b"", head, "done", now + 600.0)
        store.streams.write("gateway", [ended], now, now + 60.0)
        store.history.write([HistoryRow(MINUTE_S, int(now), "g", account, "m", Numbers())])
    store.history.write([HistoryRow(MINUTE_S, int(now), "g", EVERYBODY, "m", Numbers())])
    return store


def found(store: SqlStore, account: str) -> dict[str, Any]:
    name, now = account[0], time.time()
    return {
        "trace": store.traces.body(account, f"{name}-r"),
        "traces": store.traces.list(TraceQuery(account=account)),
        "response": store.responses.body(account, f"{name}-resp"),
        "chain": store.responses.chain(account, f"{name}-resp", 9),
        "conversation": store.conversations.find(account, f"{name}-conv"),
        "items": store.conversations.items(f"{name}-conv", limit=9),
        "stream": store.streams.shown(account, f"{name}-stream", 0),
        "history": store.history.read(MINUTE_S, int(now) - 600, int(now) + 600, account),
    }


def test_nothing_of_an_account_is_left_for_the_next_of_its_name(kept):
    assert all(found(kept, THEIRS).values())
    now = again(kept)
    assert not any(found(kept, THEIRS).values())
    assert all(found(kept, "other").values()) and found(kept, EVERYBODY + "other")["history"]
    assert len(kept.history.read(MINUTE_S, int(now) - 600, int(now) + 600, EVERYBODY)) == 1
    # Its key is free for whoever has the name now; the other's answer is still there.
    assert kept.answers.claim(KeyClaim("gateway", THEIRS, "key", now), now + 60.0, "print") is None
    assert kept.answers.claim(KeyClaim("gateway", "other", "key", now), now + 60.0, "print").answer == b"answer"


def test_what_was_on_its_way_does_not_come_back_and_what_is_new_stays(kept):
    """Such as from a journal, when the store is back."""
    before = time.time() - 10.0
    now = again(kept)
    kept.write([trace("at-once", before), trace("long", now + 1.0, 11_000.0), trace("new", now + 2.0, 1_000.0)])
    kept.write([response("late", before, before), response("slow", before, now + 1.0)])
    kept.write([response("fresh", now + 1.0, now + 1.0), items("t-conv")])
    traces = {name: kept.traces.body(THEIRS, name) is not None for name in ("at-once", "long", "new")}
    assert traces == {"at-once": False, "long": False, "new": True}
    responses = {name: kept.responses.body(THEIRS, name) is not None for name in ("late", "slow", "fresh")}
    assert responses == {"late": False, "slow": False, "fresh": True}
    assert kept.conversations.items("t-conv", limit=9) == []


def test_a_request_under_way_is_charged_and_leaves_no_answer(kept):
    before = time.time()
    mine = KeyClaim("gateway", THEIRS, "under way", before)
    assert kept.answers.claim(mine, before + 60.0, "print") is None
    now = again(kept)
    assert kept.answers.keep(mine, b"answer", [entry("e1")])
    assert kept.answers.claim(KeyClaim("gateway", THEIRS, "under way", now), now + 60.0, "print") is None
    # Whose account is there writes to its own claim only, as ever.
    assert not kept.answers.keep(KeyClaim("gateway", THEIRS, "nobody's", now + 1.0), b"answer", [entry("e2")])
    with kept.database.reading() as connection:
        ids = connection.exec_driver_sql("SELECT id FROM ledger").scalars().all()
    assert list(ids) == ["e1"]


def test_a_stream_under_way_ends_is_charged_and_is_forgotten_at_once(store):
    store.accounts.create("a")
    streams, now = store.streams, time.time()
    streams.write("one", [part("s", 1)], now, now + 60.0)
    store.accounts.remove("a")
    [running] = streams.beat("one", now + 60.0, (), now)
    assert running.cancelling
    ended = StreamPart("s", 1, 2, 2, b"last", b"", None, "cancelled", now + 600.0, (entry("e1").columns,))
    assert streams.write("one", [ended], now + 1.0, now + 60.0) == set()
    streams.trim(now + 2.0)
    shown = streams.shown("a", "s", 0)
    assert (shown.status, shown.parts) == ("expired", [])
    with store.database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one() == 1
        assert bytes(connection.exec_driver_sql("SELECT request FROM streams").scalar_one()) == b""


async def test_a_gateway_that_was_cut_off_brings_nothing_back(database, tmp_path):
    with Gateways(database, tmp_path) as gateways:
        state = gateways.make("one")
        await state.start()
        await state.change(state.admin.create, THEIRS)
        gateways.lose()
        state.traces.end(state.traces.begin("r1", THEIRS, "m"), "done")
        await state.responses.put(THEIRS, {"id": "resp_1", "created_at": 1, "previous_response_id": None}, [])
        assert (await state.responses.get(THEIRS, "resp_1"))["id"] == "resp_1"
        # Somebody else removes it, whose connection is there.
        with SqlStore(tmp_path / "elsewhere", database) as elsewhere:
            elsewhere.accounts.remove(THEIRS)
        gateways.find()
        await gateways.settled(state)
        store = state._store
        assert store.traces.body(THEIRS, "r1") is None and store.responses.body(THEIRS, "resp_1") is None
