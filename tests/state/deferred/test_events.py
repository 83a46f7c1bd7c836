"""Subscriptions and deliveries in the store, on both databases, and the command line about them."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace

import pytest
import sqlalchemy as sa
from alembic import command

from serve_app.cli import main
from serve_app.state.blobs.uploads import Upload
from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.audit import Actor
from serve_app.state.deferred.batches import Batch
from serve_app.state.deferred.events import EventsError, check_kinds, of_batch
from serve_app.state.deferred.queues import New
from serve_app.state.store import migrate
from serve_app.state.store.database import Database
from serve_app.state.store.deferred.queue_tables import queue_messages
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import deliveries
from tests.state.deferred.test_batches import BATCH, accept, run_all

NOON = 1_795_262_400.0
HOOK = "https://example.com/hook"


def batch(door: str, status: str, **about) -> Batch:
    return Batch("b" * 32, door, Caller("team-a"), NOON, NOON, 60, status, about=json.dumps(about).encode())


def test_every_change_of_who_is_told_is_in_the_audit_trail(store):
    by = Actor("key-1", "api", "r-1")
    hook = store.events.subscribe("team-a", NOON, kinds=["batch.*"], url=HOOK, by=by)
    queue = store.events.subscribe("team-a", NOON, kinds=["cf.*"], queue="q")
    store.events.change("team-a", hook.id, NOON, enabled=False, by=by)
    assert store.events.change("team-b", hook.id, NOON, enabled=True) is None
    store.events.unsubscribe("team-a", hook.id, by=by)
    found = store.accounts.audit.read("team-a", oldest_first=True)
    assert [(each.kind, each.action, each.target) for each in found] == [
        ("webhook", "create", hook.id),
        ("subscription", "create", queue.id),
        ("webhook", "update", hook.id),
        ("webhook", "delete", hook.id),
    ]
    assert found[0].by == by and found[2].changes == {"enabled": (True, False)}
    assert not any(hook.secret in str(each.changes) for each in found)


def test_an_account_that_ends_takes_what_it_has_along(store):
    kept, gone = "team-b", "team-a"
    now = time.time()
    for account in (kept, gone):
        store.accounts.create(account)
        queue = store.queues.create(account, "asks", NOON)
        store.queues.push(queue, [New(f"{account:a<32}", b"{}")], Caller(account), NOON)
        store.events.subscribe(account, NOON, kinds=["*"], url=HOOK)
        store.uploads.add(Upload(f"{account:f<32}", account, "batch", "in.jsonl", 1, NOON, f"files/{account}"))
        for name in ("1", "2"):
            store.batches.create(replace(BATCH, id=f"{account}-{name}", caller=Caller(account), deadline=now + 9e9))
        store.batches.cancel(account, f"{account}-1", now)
        tell(store, replace(batch("openai", "completed"), caller=Caller(account)))
    store.accounts.remove(gone)
    for account, count in ((kept, 1), (gone, 0)):
        assert len(store.queues.all(account)) == len(store.events.subscriptions(account)) == count
        assert len(store.uploads.page(account, now + 60)) == count
        assert (store.batches.find(account, f"{account}-2").status == "cancelling") == (not count)
    while (ended := store.batches.claim_end("r", now, now + 60)) is not None:
        store.batches.end("r", ended.id, "", "", now)
        store.batches.clear(ended.id)
    assert sorted(each.id for each in store.batches.old(now + 1)) == ["team-a-1", "team-a-2"]
    with store.database.reading() as connection:
        of = sa.select(deliveries.c.account).union_all(sa.select(queue_messages.c.id))
        assert set(connection.execute(of).scalars()) == {kept, f"{kept:a<32}"}


def tell(store, *batches: Batch) -> None:
    with store.database.writing() as connection:
        for each in batches:
            store.events.batch(connection, each, NOON)


def test_each_door_tells_in_its_own_words():
    told = of_batch(batch("workers-ai", "completed", model="@cf/a/b"), NOON)
    assert told.body == {
        "type": "cf.workersAi.model.batch.succeeded",
        "source": {"type": "workersAi.model", "modelName": "@cf/a/b"},
        "payload": {"requestId": "b" * 32},
        "metadata": {
            "accountId": "team-a",
            "eventSchemaVersion": 1,
            "eventTimestamp": "2026-11-21T12:00:00.000Z",
        },
    }
    failed = of_batch(batch("workers-ai", "expired"), NOON)
    assert failed.kind.endswith("batch.failed") and failed.body["payload"]["httpCode"] == 408
    assert of_batch(batch("workers-ai", "queued"), NOON).kind.endswith("batch.queued")
    assert of_batch(batch("openai", "expired", id="batch_7"), NOON).body["data"] == {"id": "batch_7"}
    for door, status in (("openai", "queued"), ("openai", "running"), ("workers-ai", "validating")):
        assert of_batch(batch(door, status), NOON) is None


def test_who_subscribes_is_told_and_nobody_else(store):
    all_of_a = store.events.subscribe("team-a", NOON, kinds=["*"], url=HOOK)
    model = store.events.subscribe("team-a", NOON, kinds=["cf.*"], url=HOOK, model="@cf/a/b")
    store.events.subscribe("team-a", NOON, kinds=["*"], url=HOOK, enabled=False)
    store.events.subscribe("team-b", NOON, kinds=["*"], url=HOOK)
    tell(store, batch("workers-ai", "completed", model="@cf/a/b"), batch("openai", "failed", model="@cf/a/b"))
    tell(store, batch("workers-ai", "completed", model="@cf/a/c"))
    assert len(store.events.deliveries(all_of_a.id)) == 3
    (one,) = store.events.deliveries(model.id)
    assert json.loads(one.body)["metadata"]["eventSubscriptionId"] == model.id
    assert {each.secret for each in store.events.subscriptions("team-a")} == {""} and model.secret.startswith("whsec_")
    taken = store.events.take(NOON, 10, without=[model.id])
    assert {(each.subscription, each.url, each.secret) for each in taken} == {(all_of_a.id, HOOK, all_of_a.secret)}
    store.events.unsubscribe("team-a", all_of_a.id)
    assert [each.subscription for each in store.events.take(NOON + 61, 10)] == [model.id]
    store.events.trim(NOON + 31 * 86400)
    assert store.events.deliveries(model.id) == []


def test_what_did_not_happen_is_not_told(store):
    hook = store.events.subscribe("team-a", NOON, kinds=["*"], url=HOOK)
    with pytest.raises(RuntimeError), store.database.writing() as connection:
        store.events.batch(connection, batch("openai", "failed"), NOON)
        raise RuntimeError
    assert store.events.deliveries(hook.id) == []


def test_kinds_that_no_event_has_are_refused():
    assert check_kinds(["batch.*", "batch.*"]) == ("batch.*",)
    for wrong in ([], ["batch.done"], ["Batch.*"]):
        with pytest.raises(EventsError, match="Name some of"):
            check_kinds(wrong)


def test_alerts_that_wait_are_deliveries_after_the_upgrade(database, tmp_path):
    with closing(Database(tmp_path / "old", database, lambda _: None)) as old, old.unprepared() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0009")
        names = 'account, key, kind, "window", share, id, at, spent, "limit", tries, due'
        for number, due in (("1", NOON), ("2", None)):
            row = f"'team-a', '', 'neurons', 0, 5{number}, 'msg_{number}', {NOON}, 5500000, 10000000, 1, :due"
            connection.execute(sa.text(f"INSERT INTO alerts ({names}) VALUES ({row})"), {"due": due})
    with SqlStore(tmp_path / "new", database) as store:
        store.open()
        (waiting,) = store.events.take(NOON, 10)
        assert (waiting.id, waiting.subscription) == ("msg_1", "")
        assert json.loads(waiting.body)["data"]["used"] == "5.5" and len(store.alerts.all()) == 2


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SERVE_APP_HOME", str(tmp_path))
    monkeypatch.delenv("SERVE_APP_DATABASE", raising=False)

    def shell(*words: str, status: int = 0) -> str:
        assert main(["webhooks", *words]) == status
        told = capsys.readouterr()
        return told.out if status == 0 else told.err

    secret = shell("add", HOOK, "--events", "batch.*", "--account", "team-a").strip()
    assert secret.startswith("whsec_")
    with SqlStore(tmp_path) as store:
        tell(store, batch("openai", "failed"))
        (sent,) = store.events.take(NOON, 1)
        for tries in range(12):
            store.events.later(sent.__class__(**{**_fields(sent), "tries": tries}), NOON, "answered with 500")
    (listed,) = json.loads(shell("list", "--json"))
    assert listed["deliveries"][0]["status"] == "dead" and secret not in json.dumps(listed)
    assert "dead  answered with 500" in shell("list")
    assert shell("replay", listed["id"], "--since", "2026-11-01").startswith("1 ")
    assert shell("remove", listed["id"]) == "" and shell("list") == ""
    assert "webhooks list` shows them" in shell("replay", listed["id"], status=2)
    assert "is no URL" in shell("add", "example.com", status=2)


def _fields(sent) -> dict:
    return {name: getattr(sent, name) for name in type(sent).__slots__}


def test_a_batch_tells_of_its_life_once_each(store):
    hook = store.events.subscribe("a", 10.0, kinds=["*"], url=HOOK)
    accept(store.batches, "b1", door="workers-ai", about=b'{"model":"m"}')
    assert store.batches.end("door", "b1", "", "", 11.0) is None
    run_all(store.batches, "runner", 12.0)
    ended = store.batches.claim_end("runner", 13.0, 20.0)
    assert store.batches.end("runner", ended.id, "out", "", 14.0) is not None
    assert store.batches.end("runner", ended.id, "out", "", 14.0) is None
    store.batches.create(replace(BATCH, id="b2"), "door", 16.0)
    assert not store.batches.refused("other", "b2", b"[]", 15.0) and store.batches.refused("door", "b2", b"[]", 15.0)
    told = [(each.at, each.kind) for each in store.events.deliveries(hook.id)]
    assert told[::-1] == [
        (10.0, "cf.workersAi.model.batch.queued"),
        (14.0, "cf.workersAi.model.batch.succeeded"),
        (15.0, "batch.failed"),
    ]
