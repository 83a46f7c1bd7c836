"""Queues in the store, the same on a file and on a server: a message is there once, and so is its answer."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch
from serve_app.state.deferred.queues import Answered, Backlog, Consumer, New, QueueError
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.tables import ledger

NOON = 1_795_262_400.0
CALLER = Caller("a", 2.0, "realtime", "key1")


def new(number: int, body: bytes = b"{}", **fields) -> New:
    return New(f"{number:032x}", body, **fields)


def numbers(found) -> list[int]:
    return [int(each.id, 16) for each in found]


def bound(store, results: str = "answers", **fields):
    """A queue whose messages a model runs."""
    asks, answers = store.queues.create("a", "asks", NOON), store.queues.create("a", results, NOON)
    consumer = Consumer("c", "workers_ai", NOON, model="m", results=results, **fields)
    return store.queues.change("a", asks.id, NOON, consumer=consumer), answers


def test_what_is_pulled_is_leased_and_what_is_acknowledged_is_gone(store):
    queue = store.queues.create("a", "q", NOON)
    store.queues.push(queue, [new(n, b"x" * 10, kind="text") for n in range(3)], CALLER, NOON)
    store.queues.push(queue, [new(1)], CALLER, NOON)
    assert store.queues.backlog(queue.id) == Backlog(3, 30, NOON)
    assert numbers(store.queues.peek(queue, 10, NOON)) == [0, 1, 2]
    first = store.queues.pull(queue, 2, 30, NOON)
    assert [(each.attempts, each.kind, each.body) for each in first] == [(1, "text", b"x" * 10)] * 2
    assert numbers(store.queues.pull(queue, 5, 30, NOON)) == [2] and store.queues.pull(queue, 5, 30, NOON) == []
    done = store.queues.settle(queue, [first[0].lease, "nothing"], [(first[1].lease, 60.0)], NOON + 1)
    assert (done.acked, done.retried, done.unknown) == (1, 1, ["nothing"])
    # The lease of 2 ends, and 1 is put off.
    (again,) = store.queues.pull(queue, 5, 30, NOON + 31)
    assert (numbers([again]), again.attempts) == ([2], 2)
    assert store.queues.settle(queue, [first[1].lease], [], NOON + 31).unknown == [first[1].lease]
    assert numbers(store.queues.pull(queue, 5, 30, NOON + 61)) == [1, 2]


def test_a_delay_and_a_pause_hold_messages_back(store):
    queue = store.queues.create("a", "q", NOON)
    queue = store.queues.change("a", queue.id, NOON, delay_s=10.0)
    store.queues.push(queue, [new(0), new(1, delay_s=0.0)], CALLER, NOON)
    assert numbers(store.queues.pull(queue, 5, 30, NOON)) == [1]
    assert numbers(store.queues.pull(queue, 5, 30, NOON + 10)) == [0]
    paused = store.queues.change("a", queue.id, NOON, paused=True)
    assert store.queues.pull(paused, 5, 30, NOON + 100) == []


def test_what_was_sent_before_the_clock_was_put_back_does_not_wait_for_that_time(store):
    queue, other = store.queues.create("a", "q", NOON), bound(store)[0]
    store.queues.push(queue, [new(0), new(1, delay_s=20.0)], CALLER, NOON + 3600)
    store.queues.push(other, [new(2), new(3, delay_s=20.0)], CALLER, NOON + 3600)
    assert store.queues.pull(queue, 5, 30, NOON) == [] and store.queues.take(["m"], 5, NOON, NOON + 30) == []
    store.queues.trim(NOON)
    # It is leased to one, put off as others are, and delays count from now.
    (found,) = store.queues.pull(queue, 5, 30, NOON)
    assert numbers([found]) == [0] and store.queues.pull(queue, 5, 30, NOON) == []
    assert store.queues.settle(queue, [], [(found.lease, 40.0)], NOON + 1).retried == 1
    assert store.queues.waiting(NOON)["m"].requests == 1
    assert len(store.queues.take(["m"], 5, NOON, NOON + 30)) == 1
    assert store.queues.take(["m"], 5, NOON, NOON + 30) == []
    assert numbers(store.queues.pull(queue, 5, 30, NOON + 20)) == [1]
    assert len(store.queues.take(["m"], 5, NOON + 20, NOON + 50)) == 1


@pytest.mark.parametrize("said", [True, False])
def test_after_the_last_attempt_a_message_goes_to_the_dead_letters(store, said):
    queue, dead = store.queues.create("a", "q", NOON), store.queues.create("a", "dead", NOON)
    store.queues.push(queue, [new(0)], CALLER, NOON)
    for name in ("", "dead"):
        consumer = Consumer("c", "http_pull", NOON, retries=1, delay_s=5.0, dead=name)
        queue = store.queues.change("a", queue.id, NOON, consumer=consumer)
        store.queues.push(queue, [new(bool(name))], CALLER, NOON)
        for now in (NOON, NOON + 40):
            (found,) = store.queues.pull(queue, 5, 30, now)
            if said:
                store.queues.settle(queue, [], [(found.lease, None)], now)
                assert store.queues.pull(queue, 5, 30, now + 4) == []
        assert store.queues.pull(queue, 5, 30, NOON + 80) == []
    (kept,) = store.queues.pull(dead, 5, 30, NOON + 80)
    assert (numbers([kept]), kept.attempts, kept.queue) == ([1], 1, dead.id)


def test_many_pull_at_once_and_each_message_goes_to_one(open_store):
    stores = [open_store(f"home{n}") for n in range(3)]
    queue = stores[0].queues.create("a", "q", NOON)
    stores[0].queues.push(queue, [new(n) for n in range(60)], CALLER, NOON)

    def pull(store) -> list[int]:
        found = []
        while some := store.queues.pull(queue, 7, 30, NOON):
            found += numbers(some)
            assert store.queues.settle(queue, [each.lease for each in some], [], NOON).acked == len(some)
        return found

    with ThreadPoolExecutor(3) as pool:
        pulled = [number for found in pool.map(pull, stores) for number in found]
    assert sorted(pulled) == list(range(60))


def test_queues_have_names_and_belong_together(store):
    queue, answers = bound(store)
    other = store.queues.create("b", "asks", NOON)
    assert {each.name for each in store.queues.all("a")} == {"asks", "answers"}
    assert store.queues.find("a", other.id) is None and store.queues.change("a", other.id, NOON, name="x") is None
    for wrong in (
        lambda: store.queues.create("a", "asks", NOON),
        lambda: store.queues.change("a", queue.id, NOON, name="answers"),
        lambda: store.queues.change("a", answers.id, NOON, name="renamed"),
        lambda: store.queues.change("a", answers.id, NOON, consumer=Consumer("c", "http_pull", NOON, dead="none")),
        lambda: store.queues.change("a", queue.id, NOON, consumer=Consumer("c", "http_pull", NOON, dead="asks")),
        lambda: store.queues.remove("a", answers.id),
    ):
        with pytest.raises(QueueError):
            wrong()
    assert store.queues.remove("a", queue.id) and not store.queues.remove("a", queue.id)
    assert store.queues.remove("a", answers.id) and store.queues.all("a") == []


def test_purging_empties_a_queue_or_takes_single_messages(store):
    queue = store.queues.create("a", "q", NOON)
    store.queues.push(queue, [new(n) for n in range(4)], CALLER, NOON)
    assert store.queues.purge(queue, NOON, [new(1).id, "none"]) == 1
    assert store.queues.purge(queue, NOON) == 3 and store.queues.find("a", queue.id).purged == NOON


def entry(name: str) -> Entry:
    return Entry(name, "a", "key1", NOON, 1.0, "m", "t", "done", {"input_tokens": 3}, 7, 9, "USD", batch="q")


def charged(store) -> list[str]:
    with store.database.reading() as connection:
        return sorted(connection.execute(sa.select(ledger.c.id)).scalars())


def test_an_answer_is_written_once_with_its_entry_under_the_lease(store):
    queue, answers = bound(store)
    store.queues.push(queue, [new(0, b'{"prompt": "x"}')], CALLER, NOON)
    assert store.queues.waiting(NOON)["m"].requests == 1 and store.queues.take(["other"], 5, NOON, NOON + 9) == []
    (slow,) = store.queues.take(["m"], 5, NOON, NOON + 10)
    assert (slow.caller, slow.consumer.model, slow.message.body) == (CALLER, "m", b'{"prompt": "x"}')
    assert store.queues.take(["m"], 5, NOON, NOON + 10) == []
    assert store.queues.renew([slow.message.lease], NOON + 20) == {slow.message.lease}
    assert store.queues.take(["m"], 5, NOON + 15, NOON + 30) == []
    # It is taken for dead, and comes back.
    (fast,) = store.queues.take(["m"], 5, NOON + 20, NOON + 30)
    assert store.queues.renew([slow.message.lease], NOON + 99) == set()
    assert store.queues.answer([Answered(slow, b"slow", [entry("r").row()])], NOON + 21) == set()
    assert charged(store) == [] and store.queues.backlog(answers.id).count == 0
    answer = Answered(fast, b"fast", [entry("r").row()])
    assert store.queues.answer([answer], NOON + 22) == {fast.message.id}
    assert store.queues.answer([answer], NOON + 22) == set()
    assert charged(store) == ["r"] and store.queues.backlog(queue.id).count == 0
    (got,) = store.queues.pull(answers, 5, 30, NOON + 22)
    assert got.body == b"fast"


def test_one_that_failed_is_answered_and_kept_with_the_dead_letters(store):
    dead = store.queues.create("a", "dead", NOON)
    queue, answers = bound(store, dead="dead")
    store.queues.push(queue, [new(0), new(1)], CALLER, NOON)
    first, second = store.queues.take(["m"], 5, NOON, NOON + 10)
    store.queues.again(first, NOON + 5, counts=False)
    assert store.queues.answer([Answered(second, b"bad", dead=True)], NOON) == {second.message.id}
    (again,) = store.queues.take(["m"], 5, NOON + 5, NOON + 15)
    assert again.message.attempts == 1
    assert numbers(store.queues.pull(dead, 5, 30, NOON + 5)) == [1]
    assert [each.body for each in store.queues.pull(answers, 5, 30, NOON)] == [b"bad"]


def test_what_waits_too_long_is_dropped_and_a_request_answered(store):
    queue, answers = bound(store)
    store.queues.push(queue, [new(0)], CALLER, NOON)
    store.queues.push(answers, [new(1)], CALLER, NOON)
    later = NOON + 4 * 86400
    assert store.queues.take(["m"], 5, later, later) == [] == store.queues.pull(answers, 5, 30, later)
    store.queues.trim(later)
    (told,) = store.queues.pull(answers, 5, 30, later)
    said = json.loads(told.body)
    assert (said["request_id"], said["status"], said["success"]) == (new(0).id, 408, False)


def test_runners_that_lose_leases_answer_each_request_once(open_store):
    """Leases of no length: runners take each other's messages all the time."""
    stores = [open_store(f"home{n}") for n in range(3)]
    queue, answers = bound(stores[0])
    stores[0].queues.push(queue, [new(n) for n in range(30)], CALLER, NOON)

    def run(number: int) -> int:
        store, random_, written = stores[number], random.Random(number), 0
        while stores[0].queues.backlog(queue.id).count:
            tasks = store.queues.take(["m"], 8, NOON, NOON + random_.choice([0.0, 0.0, 10.0]))
            some = [Answered(task, task.message.id.encode(), [entry(task.message.id).row()]) for task in tasks]
            keep = [each for each in some if random_.random() < 0.7]
            written += len(store.queues.answer(keep, NOON))
            for each in some:
                if each not in keep:
                    store.queues.again(each.task, NOON, counts=False)
        return written

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(run, range(3))) == 30
    bodies = [each.body for each in stores[0].queues.pull(answers, 100, 30, NOON)]
    assert sorted(bodies) == sorted(new(n).id.encode() for n in range(30)) and len(charged(stores[0])) == 30


def test_events_come_as_messages_in_the_transaction_that_makes_them_true(store):
    queue = store.queues.create("a", "q", NOON)
    store.events.subscribe("a", NOON, kinds=["cf.*"], queue=queue.id, model="m")
    told = Batch("b" * 32, "workers-ai", CALLER, NOON, NOON, 60, "completed", about=b'{"model": "m"}')
    with store.database.writing() as connection:
        store.events.batch(connection, told, NOON)
    (message,) = store.queues.pull(queue, 5, 30, NOON)
    assert json.loads(message.body)["payload"] == {"requestId": "b" * 32}
    assert store.events.take(NOON, 5) == []
    store.queues.remove("a", queue.id)
    assert store.events.subscriptions("a") == []
