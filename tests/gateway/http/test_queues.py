"""Queues by Cloudflare's own client, from their creation to their end."""

from __future__ import annotations

import base64
import json
import time

from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.deferred.batches import Batch
from serve_app.state.deferred.queues import Answered
from tests.gateway.http.test_accounts import CHAT, KEY, refused, served  # noqa: F401

ME = {"account_id": "local"}


async def test_messages_from_push_to_ack(served):  # noqa: F811
    queues = served.sdk().queues
    made = await queues.create(**ME, queue_name="asks")
    assert [each.queue_name async for each in queues.list(**ME)] == ["asks"]
    assert (await queues.get(made.queue_id, **ME)).settings.message_retention_period == 4 * 86400
    edited = await queues.edit(made.queue_id, **ME, settings={"delivery_delay": 3600, "delivery_paused": True})
    assert (edited.settings.delivery_delay, edited.settings.delivery_paused) == (3600, True)
    reset = await queues.update(made.queue_id, **ME, queue_name="renamed")
    assert (reset.queue_name, reset.settings.delivery_delay, reset.settings.delivery_paused) == ("renamed", 0, False)
    pushed = await queues.messages.push(made.queue_id, **ME, body="plain", content_type="text")
    assert pushed.metadata.metrics.backlog_count == 1
    messages = [{"body": {"n": 1}, "content_type": "json"}, {"body": [2], "delay_seconds": 3600}]
    await queues.messages.bulk_push(made.queue_id, **ME, messages=messages)
    peeked = (await queues.messages.peek(made.queue_id, **ME, batch_size=10)).messages
    assert len(peeked) == 3
    got = await queues.messages.pull(made.queue_id, **ME, batch_size=10, visibility_timeout_ms=60_000)
    assert got.message_backlog_count == got.metadata.metrics.backlog_count == 3
    text, made_json = got.messages
    assert (text.body, text.attempts, text.metadata["CF-Content-Type"]) == ("plain", 1, "text")
    assert json.loads(base64.b64decode(made_json.body)) == {"n": 1} and abs(text.timestamp_ms / 1000 - time.time()) < 60
    assert (await queues.messages.pull(made.queue_id, **ME)).messages == []
    done = await queues.messages.ack(
        made.queue_id,
        **ME,
        acks=[{"lease_id": text.lease_id}, {"lease_id": "x"}],
        retries=[{"lease_id": made_json.lease_id, "delay_seconds": 0}],
    )
    assert (done.ack_count, done.retry_count, list(done.warnings)) == (1, 1, ["x"])
    (again,) = (await queues.messages.pull(made.queue_id, **ME)).messages
    assert (again.id, again.attempts) == (made_json.id, 2)
    await queues.messages.purge(made.queue_id, **ME, refs=[{"ref": again.id}])
    assert (await queues.get_metrics(made.queue_id, **ME)).backlog_count == 1
    await queues.purge.start(made.queue_id, **ME, delete_messages_permanently=True)
    assert (await queues.purge.status(made.queue_id, **ME)).started_at
    assert (await queues.get_metrics(made.queue_id, **ME)).backlog_count == 0
    assert (await queues.delete(made.queue_id, **ME)).success
    await refused(lambda: queues.get(made.queue_id, **ME), 404)


async def test_a_full_queue_takes_nothing_until_there_is_room(served, monkeypatch):  # noqa: F811
    monkeypatch.setattr("serve_app.state.deferred.queues.MAX_BACKLOG", 2048)
    queues = served.sdk().queues
    made = await queues.create(**ME, queue_name="asks")
    for _ in range(2):
        await queues.messages.push(made.queue_id, **ME, body="x", content_type="text")
    assert "is full" in await refused(lambda: queues.messages.push(made.queue_id, **ME, body="x"), 429)
    got = await queues.messages.pull(made.queue_id, **ME, batch_size=1)
    await queues.messages.ack(made.queue_id, **ME, acks=[{"lease_id": got.messages[0].lease_id}])
    assert (await queues.messages.push(made.queue_id, **ME, body="x")).metadata.metrics.backlog_count == 2


async def test_a_queue_bound_to_a_model(served):  # noqa: F811
    queues = served.sdk().queues
    asks, answers = [await queues.create(**ME, queue_name=name) for name in ("asks", "answers")]
    bound = {"type": "workers_ai", "extra_body": {"model": CHAT, "results_queue": "answers"}}
    consumer = await queues.consumers.create(asks.queue_id, **ME, **bound)
    assert (consumer.type, consumer.model, consumer.settings.max_retries) == ("workers_ai", CHAT, 3)
    assert [each.consumer_id async for each in queues.consumers.list(asks.queue_id, **ME)] == [consumer.consumer_id]
    assert (await queues.get(asks.queue_id, **ME)).consumers_total_count == 1
    headers = {"Idempotency-Key": "once"}
    for _ in range(2):
        await queues.messages.push(asks.queue_id, **ME, body={"prompt": "x"}, extra_headers=headers)
    store = served.gateways[0].state.queues
    (task,) = store.take([CHAT], 9, time.time(), time.time() + 60)
    assert (task.caller.account, task.caller.key) == ("local", hash_key(KEY)[:12])
    store.answer([Answered(task, b'{"success":true}')], time.time())
    (got,) = (await queues.messages.pull(answers.queue_id, **ME)).messages
    assert base64.b64decode(got.body) == b'{"success":true}'
    assert "run by" in await refused(lambda: queues.messages.pull(asks.queue_id, **ME), 400)
    assert "no JSON object" in await refused(lambda: queues.messages.push(asks.queue_id, **ME, body="hello"), 400)
    assert "Remove the consumer" in await refused(lambda: queues.delete(answers.queue_id, **ME), 409)
    updated = await queues.consumers.update(
        consumer.consumer_id, **ME, queue_id=asks.queue_id, type="http_pull", settings={"batch_size": 7}
    )
    assert (updated.type, updated.settings.batch_size, updated.consumer_id) == ("http_pull", 7, consumer.consumer_id)
    await queues.consumers.delete(consumer.consumer_id, **ME, queue_id=asks.queue_id)
    assert (await queues.delete(answers.queue_id, **ME)).success


async def test_what_is_refused(served):  # noqa: F811
    queues = served.sdk().queues
    made = await queues.create(**ME, queue_name="asks")
    push, one = queues.messages.push, made.queue_id
    assert "already" in await refused(lambda: queues.create(**ME, queue_name="asks"), 409)
    assert "1 to 63" in await refused(lambda: queues.create(**ME, queue_name="a b"), 400)
    assert "no Workers" in await refused(
        lambda: queues.consumers.create(one, **ME, type="worker", script_name="x"), 400
    )
    await refused(
        lambda: queues.consumers.create(
            one, **ME, type="workers_ai", extra_body={"model": "@cf/no/no", "results_queue": "asks"}
        ),
        400,
    )
    assert "no queue 'dead'" in await refused(
        lambda: queues.consumers.create(one, **ME, type="http_pull", dead_letter_queue="dead"), 409
    )
    assert "131072" in await refused(lambda: push(one, **ME, body="x" * 131_073), 413)
    big = [{"body": "x" * 100_000}] * 3
    assert "262144" in await refused(lambda: queues.messages.bulk_push(one, **ME, messages=big), 413)
    many = [{"body": "x"}] * 101
    assert "at most 100" in await refused(lambda: queues.messages.bulk_push(one, **ME, messages=many), 400)
    assert "messages[1].body" in await refused(
        lambda: queues.messages.bulk_push(one, **ME, messages=[{"body": "x"}, {}]), 400
    )
    assert "batch_size" in await refused(lambda: queues.messages.pull(one, **ME, batch_size=101), 400)
    await refused(lambda: queues.get("\x00", **ME), 404)
    other = await served.sdk().accounts.create(name="team-b", type="standard")
    key = await served.sdk().accounts.tokens.create(
        account_id=other.id, name="ci", policies=[{"effect": "allow", "permission_groups": [{"id": "inference"}],
                                                   "resources": {}}],
    )  # fmt: skip
    theirs = served.sdk(key.value).queues
    await refused(lambda: theirs.get(one, account_id="team-b"), 404)
    await refused(lambda: theirs.get(one, **ME), 403)


async def test_events_come_into_a_queue(served):  # noqa: F811
    sdk = served.sdk()
    queue = await sdk.queues.create(**ME, queue_name="events")
    subscriptions = sdk.queues.subscriptions
    made = await subscriptions.create(
        **ME,
        name="all",
        source={"type": "workersAi.model", "model_name": CHAT},
        destination={"type": "queues.queue", "queue_id": queue.queue_id},
        events=["batch.succeeded", "batch.failed"],
    )
    assert [each.id async for each in subscriptions.list(**ME)] == [made.id]
    found = await subscriptions.get(made.id, **ME)
    assert (found.events, found.source.ai_model_name) == (["batch.succeeded", "batch.failed"], CHAT)
    store = served.gateways[0].state._store
    ended = Batch(
        "b" * 32, "workers-ai", Caller("local"), 0.0, 0.0, 0.0, "completed", json.dumps({"model": CHAT}).encode()
    )
    with store.database.writing() as connection:
        store.events.batch(connection, ended, time.time())
    (got,) = (await sdk.queues.messages.pull(queue.queue_id, **ME)).messages
    assert json.loads(base64.b64decode(got.body))["metadata"]["eventSubscriptionId"] == made.id
    assert not (await subscriptions.update(made.id, **ME, enabled=False)).enabled
    assert (await subscriptions.delete(made.id, **ME)).id == made.id
    assert [each.id async for each in subscriptions.list(**ME)] == []
