"""Runners over a real store, files and ledger; what runs a request is each test's own, as it is handed to runners."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress

import pytest

from serve_app.batch import runner as runners
from serve_app.batch.job import Done, Job
from serve_app.state.blobs.files import Files, open_files
from serve_app.state.deferred.batches import Counts, forget
from serve_app.state.errors import Away
from tests.batch.running import answer, check_complete, ended, make, runner, running, until

# The store's own tests run on both databases; where two runners meet, and what they do when one dies, does here too.
one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture
def files(tmp_path) -> Files:
    return open_files(str(tmp_path / "files"))


async def test_two_runners_work_batches_off_together(store, open_store, files):
    batches = [make(store.batches, files, f"b{n}", 18 + n, account=f"team-{n % 2}") for n in range(3)]
    other = open_store("elsewhere")
    async with running(runner(store.batches, files), runner(other.batches, files)):
        for n, batch in enumerate(batches):
            found = await ended(store.batches, batch)
            assert found.status == "completed" and found.counts == Counts(18 + n, 18 + n)
            check_complete(store, files, found, 18 + n)
            assert forget(store.batches, files, found) and files.list(f"batches/{batch.id}/") == []
    assert not store.batches.busy()


@one_database
async def test_requests_are_tried_again_where_that_helps_and_fail_clearly_where_not(store, files, monkeypatch):
    monkeypatch.setattr(runners, "BACKOFF_S", 0.001)
    tried: Counter[int] = Counter()

    async def perform(job: Job) -> Done:
        number = job.request.number
        tried[number] += 1
        if number == 0 and tried[0] <= 5:
            return Done(429, b'{"busy":1}', [], 0.001)
        if number == 1:
            return Done(400, b'{"wrong":1}')
        if number == 2:
            return Done(429, b'{"lost":1}', [], 0.001, at_fault=True)
        if number == 3:
            raise RuntimeError("nobody expects it")
        return await answer(job)

    batch = make(store.batches, files, "b", 6)
    async with running(runner(store.batches, files, perform)):
        found = await ended(store.batches, batch)
    assert found.status == "completed" and found.counts == Counts(6, 3, 3)
    check_complete(store, files, found, 6)
    assert tried == {0: 6, 1: 1, 2: runners.MAX_FAULTS, 3: runners.MAX_FAULTS, 4: 1, 5: 1}


@one_database
async def test_what_has_been_checked_is_begun_without_another_look(store, files, monkeypatch):
    monkeypatch.setattr(runners, "TURN_S", 600.0)
    monkeypatch.setattr(runners, "IDLE_S", 600.0)
    one = runner(store.batches, files)
    async with running(one):
        for name in ("a", "b"):
            batch = make(store.batches, files, name, 4)
            one.wake()
            check_complete(store, files, await ended(store.batches, batch), 4)


@one_database
async def test_no_more_run_at_once_than_there_is_room_for(store, files):
    now = Counter[str]()
    full = asyncio.Event()

    async def perform(job: Job) -> Done:
        now[job.batch] += 1
        # Two models, three places each.
        assert now.total() <= 6
        if now.total() == 6:
            full.set()
        await full.wait()
        now[job.batch] -= 1
        return await answer(job)

    made = [make(store.batches, files, f"b{n}", 20, account=f"team-{n}") for n in range(2)]
    async with running(runner(store.batches, files, perform, room=3)):
        for batch in made:
            check_complete(store, files, await ended(store.batches, batch), 20)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@one_database
async def test_what_is_ended_early_ends_at_once_and_gives_what_is_done(store, files, how, monkeypatch):
    monkeypatch.setattr(runners, "RENEW_S", 0.02)
    begun, stopped = set[int](), set[int]()
    late = 0.0

    async def perform(job: Job) -> Done:
        if job.request.number > 10:
            return await answer(job)
        begun.add(job.request.number)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.add(job.request.number)
            raise
        raise AssertionError

    batch = make(store.batches, files, "b", 16)
    async with running(runner(store.batches, files, perform, room=4, clock=lambda: time.time() + late)):
        await until(lambda: len(begun) == 8 and store.batches.find("a", "b").counts.succeeded == 5)
        if how == "cancelled":
            store.batches.cancel("a", "b", time.time())
        else:
            late = 700.0
        found = await ended(store.batches, batch)
    assert found.status == how and stopped == begun
    assert found.counts == Counts(16, 5, **{how: 11})
    check_complete(store, files, found, 16)


async def test_work_of_a_runner_that_is_gone_is_taken_over(store, open_store, files):
    held = asyncio.Event()
    seen: Counter[int] = Counter()

    async def stuck(job: Job) -> Done:
        if job.request.number % 4 == 0:
            held.set()
            await asyncio.Event().wait()
        return await answer(job)

    async def perform(job: Job) -> Done:
        seen[job.request.number] += 1
        return await answer(job)

    batch = make(store.batches, files, "b", 12)
    first = runner(store.batches, files, stuck, lease_s=1.0)
    task = asyncio.ensure_future(first.run())
    await until(lambda: store.batches.find("a", "b").counts.succeeded == 9)
    # As if it had been killed: it neither renews nor gives back.
    with suppress(asyncio.CancelledError):
        first._leave = lambda: asyncio.sleep(0)
        task.cancel()
        await task
    async with running(runner(open_store("elsewhere").batches, files, perform)):
        found = await ended(store.batches, batch)
    check_complete(store, files, found, 12)
    assert seen == {0: 1, 4: 1, 8: 1}


async def test_a_clock_that_is_moved_changes_no_result(store, open_store, files):
    moved = 0.0

    async def perform(job: Job) -> Done:
        await asyncio.sleep(0.002)
        return await answer(job)

    batch = make(store.batches, files, "b", 40, deadline=time.time() + 86_400)
    one, two = (
        runner(rooms, files, perform, room=2, clock=lambda: time.time() + moved, lease_s=1.0)
        for rooms in (store.batches, open_store("elsewhere").batches)
    )
    async with running(one, two):
        await until(lambda: store.batches.find("a", "b").counts.succeeded > 5)
        moved = 3600.0
        await until(lambda: store.batches.find("a", "b").counts.succeeded > 20)
        moved = 0.0
        found = await ended(store.batches, batch)
    check_complete(store, files, found, 40)


@one_database
async def test_results_wait_while_the_store_is_away(store, files, monkeypatch):
    monkeypatch.setattr("serve_app.batch.asking.AGAIN_S", 0.01)
    write, failed = store.batches.write, []

    def away(*call):
        if len(failed) < 5:
            failed.append(call)
            raise Away("no disk")
        return write(*call)

    monkeypatch.setattr(store.batches, "write", away)
    batch = make(store.batches, files, "b", 8)
    async with running(runner(store.batches, files)):
        found = await ended(store.batches, batch)
    assert len(failed) == 5
    check_complete(store, files, found, 8)


@one_database
async def test_a_full_disk_delays_the_files_of_results(store, files, monkeypatch):
    monkeypatch.setattr("serve_app.batch.asking.AGAIN_S", 0.01)
    put, failed = files.put, []

    def full(name, data):
        if name.endswith("output.jsonl") and len(failed) < 3:
            failed.append(name)
            raise OSError(28, "No space left on device")
        return put(name, data)

    monkeypatch.setattr(files, "put", full)
    batch = make(store.batches, files, "b", 8)
    async with running(runner(store.batches, files)):
        found = await ended(store.batches, batch)
    assert len(failed) == 3
    check_complete(store, files, found, 8)


@one_database
async def test_an_account_that_must_wait_keeps_no_place_of_others(store, files, monkeypatch):
    monkeypatch.setattr(runners, "REST_S", 0.5)
    monkeypatch.setattr(runners, "RENEW_S", 0.02)
    monkeypatch.setattr(runners, "MAX_SHARDS", 3)

    async def perform(job: Job) -> Done:
        return Done(429, b"{}", [], 40.0) if job.caller.account == "spent" else await answer(job)

    make(store.batches, files, "spent", 40, account="spent")
    working = runner(store.batches, files, perform)
    async with running(working):
        await until(lambda: working.tries >= 12)
        found = await ended(store.batches, make(store.batches, files, "b", 8))
    check_complete(store, files, found, 8)
    assert store.batches.find("spent", "spent").counts == Counts(40)


@one_database
async def test_an_input_that_cannot_be_checked_is_refused(store, files, monkeypatch):
    batch = make(store.batches, files, "b", 4)
    files.put(batch.input, b"no number\n")
    async with running(runner(store.batches, files)):
        found = await ended(store.batches, batch)
    assert found.status == "failed" and b"could not check" in found.problems


async def test_a_runner_that_ends_leaves_nothing_claimed(store, open_store, files):
    async def stuck(job: Job) -> Done:
        await asyncio.Event().wait()
        raise AssertionError

    batch = make(store.batches, files, "b", 8)
    async with running(runner(store.batches, files, stuck, lease_s=50.0)):
        await until(lambda: store.batches.find("a", "b").status == "running")
    async with running(runner(open_store("elsewhere").batches, files)):
        found = await ended(store.batches, batch)
    check_complete(store, files, found, 8)
