"""Batches for runners: made without an API, run by a function whose answers say what they were asked, and checked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from serve_app.batch.ends import Ends
from serve_app.batch.job import Done, Job
from serve_app.batch.runner import Runner
from serve_app.state.blobs.files import Files
from serve_app.state.callers.accounts import Caller
from serve_app.state.deferred.batches import Batch, BatchStore, Counts, Request, Result, Shard, Waiting, pack
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger

SIZE = 4


class Steady:
    """The same room for every model."""

    def __init__(self, room: int = 4) -> None:
        self._room = room
        self.planned: dict[str, Waiting] = {}

    def plan(self, waiting, now) -> None:
        self.planned = dict(waiting)

    def room(self, model: str) -> int:
        return self._room

    def told(self, model, done, seconds) -> None: ...


@dataclass(slots=True, frozen=True)
class ShardPlan:
    shards: list[Shard]
    wrong: list[Result]


def make(store: BatchStore, files: Files, batch_id: str, count: int, *, account: str = "a", **fields: Any) -> Batch:
    """Writes a batch down whose input is JSON lines of numbers; runners check it themselves."""
    now = time.time()
    files.put(f"batches/{batch_id}/input.jsonl", b"".join(b"%d\n" % n for n in range(count)))
    batch = Batch(batch_id, "python", Caller(account, key="k"), now, now + 600, 60.0, counts=Counts(count))
    batch = replace(batch, input=f"batches/{batch_id}/input.jsonl", **fields)
    store.create(batch)
    return batch


def checker(files: Files) -> Callable[[Batch, Callable[[], bool]], ShardPlan]:
    """Cuts the input of :func:`make` into shards of :data:`SIZE` requests of two models, the last ones first."""

    def check(batch: Batch, stop: Callable[[], bool]) -> ShardPlan:
        numbers = [int(line) for line in files.get(batch.input).splitlines()][::-1]
        shards = []
        for n, start in enumerate(range(0, len(numbers), SIZE)):
            cut = [Request(n, f"id{n}", "/run", b"%d" % n) for n in numbers[start : start + SIZE]]
            files.put(blob := f"batches/{batch.id}/shards/{n:06}", pack(cut))
            shards.append(Shard(n, f"m{n % 2}", blob, len(cut)))
        return ShardPlan(shards, [])

    return check


def entry_of(job: Job) -> Entry:
    units = {"input_tokens": job.request.number + 1, "output_tokens": 2}
    return Entry(
        job.request_id, job.caller.account, "k", time.time(), 0.1, "m", "t", "done", units, 7, 9, "USD", batch=job.batch
    )


async def answer(job: Job) -> Done:
    """What is asked comes back, and is charged."""
    await asyncio.sleep(0)
    return Done(200, b'{"asked":%d}' % job.request.number, [entry_of(job)])


def lines(batch: Batch, results: Iterable[Result], errors: bool) -> Iterator[bytes]:
    for one in results:
        if (one.outcome != "succeeded") == errors:
            body = json.loads(one.body or b"null")
            yield json.dumps([one.number, one.id, one.outcome, one.status, body, one.request_id]).encode() + b"\n"


def runner(
    store: BatchStore,
    files: Files,
    perform: Callable[[Job], Awaitable[Done]] = answer,
    *,
    room: int = 8,
    clock: Callable[[], float] = time.time,
    lease_s: float = 10.0,
) -> Runner:
    ends = Ends(store, files, checker(files), lines)
    return Runner(store, files, perform, ends, Steady(room), clock=clock, lease_s=lease_s)


@asynccontextmanager
async def running(*runners: Any):
    tasks = [asyncio.ensure_future(one.run()) for one in runners]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(true: Callable[[], Any], patience_s: float = 120.0) -> Any:
    limit = time.monotonic() + patience_s
    while not (found := await asyncio.to_thread(true)):
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)
    return found


async def ended(store: BatchStore, batch: Batch, patience_s: float = 120.0) -> Batch:
    """Waits until the batch has ended and everything of it is put away."""

    def look() -> Batch | None:
        found = store.find(batch.caller.account, batch.id)
        return found if found is not None and found.ended is not None and batch.id not in store.uncleared() else None

    return await until(look, patience_s)


def check_complete(store: SqlStore, files: Files, batch: Batch, count: int, *, tidy: bool = True) -> None:
    """Every request has one line, in the order of the input; each that succeeded one entry; and the sums are theirs.
    ``tidy``: nothing else of it is among the files.
    """
    found = [json.loads(line) for name in (batch.output, batch.errors) if name for line in files.get(name).splitlines()]
    for name in (batch.output, batch.errors):
        numbers = [json.loads(line)[0] for line in files.get(name).splitlines()] if name else []
        assert numbers == sorted(numbers)
    if found or batch.counts.cancelled != count:
        # Of a batch that was cancelled before it was checked nobody knows its requests.
        assert sorted(line[0] for line in found) == list(range(count))
    assert all(line[1] == f"id{line[0]}" for line in found)
    done = [line for line in found if line[2] == "succeeded"]
    assert all(line[4] == {"asked": line[0]} for line in done)
    counts = batch.counts
    assert (counts.total, counts.succeeded, counts.left) == (count, len(done), 0)
    with store.database.reading() as connection:
        entries = connection.execute(sa.select(ledger).where(ledger.c.batch == batch.id)).all()
    assert sorted(entry.id for entry in entries) == sorted(line[5] for line in done)
    assert batch.used.neurons == sum(entry.neurons for entry in entries)
    assert batch.used.input_tokens == sum(line[0] + 1 for line in done)
    assert store.batches.results(batch.id) == [] and store.batches.shards(batch.id) == []
    left = {batch.input, batch.output, batch.errors} - {""}
    assert left <= set(files.list(f"batches/{batch.id}/"))
    if tidy:
        assert left == set(files.list(f"batches/{batch.id}/"))
