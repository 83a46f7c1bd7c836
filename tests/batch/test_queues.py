"""The runner of queues: each request has one answer, whatever happens to the runner that had it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from serve_app.batch.job import Done, Job
from serve_app.batch.queues import QueueRunner, Sharer
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Waiting
from serve_app.state.deferred.queues import Consumer, New
from serve_app.state.store.sql import SqlStore
from tests.batch.running import Steady
from tests.waiting import until

CALLER = Caller("a", key="key1")


@pytest.fixture
def store(tmp_path):
    with SqlStore(tmp_path) as found:
        found.open()
        yield found


@pytest.fixture
def queue(store):
    made = store.queues.create("a", "asks", time.time())
    store.queues.create("a", "answers", time.time())
    return bind(store, made)


def bind(store, queue, **fields):
    consumer = Consumer("c", "workers_ai", 0.0, model="@cf/a/b", results="answers", **fields)
    return store.queues.change("a", queue.id, time.time(), consumer=consumer)


def push(store, queue, *bodies: bytes) -> None:
    new = [New(f"{n:x}".ljust(32, "0"), body) for n, body in enumerate(bodies, 1)]
    store.queues.push(queue, new, CALLER, time.time())


def answers(store) -> list[dict]:
    (queue,) = (each for each in store.queues.all("a") if each.name == "answers")
    return [json.loads(each.body) for each in store.queues.peek(queue, 100, time.time())]


@asynccontextmanager
async def running(store, perform, **fields):
    runner = QueueRunner(store.queues, perform, fields.pop("pace", Steady()), **fields)
    task = asyncio.ensure_future(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_answers_come_as_each_is_finished(store, queue):
    slow, jobs = asyncio.Event(), []

    async def perform(job: Job) -> Done:
        jobs.append(job)
        if b"slow" in job.request.body:
            await slow.wait()
        said = json.dumps({"result": {"response": "x"}, "success": True, "errors": [], "messages": []})
        return Done(200, said.encode())

    push(store, queue, b'{"prompt": "slow"}', b'{"prompt": "b", "external_reference": "row-2"}')
    async with running(store, perform):
        await until(lambda: answers(store))
        assert answers(store) == [
            {
                "request_id": f"{2:x}".ljust(32, "0"),
                "external_reference": "row-2",
                "status": 200,
                "result": {"response": "x"},
                "success": True,
                "errors": [],
                "messages": [],
            }
        ]
        slow.set()
        await until(lambda: len(answers(store)) == 2)
    assert store.queues.backlog(queue.id).count == 0
    assert {job.request.url for job in jobs} == {"/client/v4/accounts/a/ai/run/@cf/a/b"}
    assert {job.batch for job in jobs} == {queue.id} and len({job.request_id for job in jobs}) == 2
    assert all(job.caller == CALLER for job in jobs)


async def test_what_may_go_better_is_tried_again_and_what_may_not_is_answered(store, queue, monkeypatch):
    monkeypatch.setattr("serve_app.batch.queues.BACKOFF_S", 0.0)
    queue, tries = bind(store, queue, retries=1), {b"busy": 0, b"fault": 0, b"wrong": 0}

    async def perform(job: Job) -> Done:
        tries[job.request.body] += 1
        if job.request.body == b"busy":
            return Done(429, b"{}", [], None if tries[b"busy"] > 5 else 0.0)
        return Done(400, b'{"errors": ["bad"]}', [], 0.0 if job.request.body == b"fault" else None, at_fault=True)

    push(store, queue, *tries)
    async with running(store, perform):
        await until(lambda: len(answers(store)) == 3)
    # Capacity counts as no attempt; what may be at fault has its attempts, and what is wrong has one.
    assert tries == {b"busy": 6, b"fault": 2, b"wrong": 1}
    assert sorted(each["status"] for each in answers(store)) == [400, 400, 429]


async def test_a_runner_that_ends_leaves_its_messages_at_once(store, queue):
    begun = []

    async def hangs(job: Job) -> Done:
        begun.append(job)
        await asyncio.Event().wait()
        raise AssertionError

    push(store, queue, b"{}")
    async with running(store, hangs):
        await until(lambda: begun)

    async def answering(job: Job) -> Done:
        return Done(200, b'{"result": {}, "success": true}')

    async with running(store, answering):
        await until(lambda: answers(store))
    assert store.queues.backlog(queue.id).count == 0


async def test_a_runner_that_lost_its_lease_stops_and_adds_nothing(store, queue):
    """Its clock stands still, so that its leases end for the others."""
    began, ended = [], []

    async def slow(job: Job) -> Done:
        began.append(job)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(job)
        raise AssertionError

    async def quick(job: Job) -> Done:
        return Done(200, b'{"result": {}, "success": true}')

    push(store, queue, b"{}")
    early = time.time()
    async with running(store, slow, clock=lambda: early, lease_s=0.2) as runner:
        await until(lambda: began)
        async with running(store, quick, clock=lambda: early + 10):
            await until(lambda: answers(store))
        await until(lambda: ended)
        assert runner.lost == 1
    assert len(answers(store)) == 1


async def test_one_that_runners_are_lost_over_is_given_up(store, queue):
    push(store, queue, b"{}")
    for _ in range(14):
        store.queues.take(["@cf/a/b"], 1, time.time(), 0.0)

    async def never(job: Job) -> Done:
        raise AssertionError

    async with running(store, never):
        await until(lambda: answers(store))
    assert answers(store)[0]["status"] == 500


def test_a_pace_is_shared_with_the_batches():
    pace, sharers = Steady(5), []
    batches, queues = Sharer(pace, sharers), Sharer(pace, sharers)
    batches.plan({"m": Waiting(3, 50.0), "n": Waiting(1, 10.0)}, 0.0)
    assert (batches.room("m"), queues.room("n")) == (5, 3)
    queues.plan({"m": Waiting(2, 20.0)}, 0.0)
    assert pace.planned == {"m": Waiting(5, 20.0), "n": Waiting(1, 10.0)}
    assert (batches.room("m"), batches.room("n")) == (3, 5)
