"""Paths of requests: own ones only, bounded, shared between gateways of a node."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from serve_app.api.errors import NotFound
from serve_app.state.peers import Peers
from serve_app.state.traces import FLUSH_S, MAX_EVENTS, PathStore

ALONE = Peers()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "paths.sqlite3"


async def flushed(store: PathStore) -> None:
    while store._flushing is not None and not store._flushing.done():
        await asyncio.sleep(FLUSH_S / 5)


async def test_a_path_is_there_while_it_runs_and_afterwards_also_at_another_gateway(file):
    store, other = PathStore(file), PathStore(file)
    path = store.begin("r1", "a", "m")
    path.event("received", prompt_tokens=7, nothing=None)
    running = await store.get("a", "r1", ALONE)
    assert running["status"] == "running" and running["model"] == "m"
    assert running["events"] == [{"event": "received", "ms": running["events"][0]["ms"], "prompt_tokens": 7}]
    store.end(path, "done", completion_tokens=3)
    just_ended = await store.get("a", "r1", ALONE)
    assert just_ended["status"] == "done" and just_ended["events"][-1]["completion_tokens"] == 3
    await flushed(store)
    assert await other.get("a", "r1", ALONE) == await store.get("a", "r1", ALONE) == just_ended
    assert not store._running and not store._ended
    store.close()
    other.close()


async def test_a_path_is_found_before_it_is_in_the_file_as_well(file):
    """A client asks right after its answer, and a proxy sends it to another gateway."""
    stores = [PathStore(file), PathStore(file)]
    asked = []

    async def ask(method, wire):
        asked.append((method, wire))
        return [await store.find(wire["account"], wire["id"]) for store in stores]

    path = stores[0].begin("r1", "a", "m")
    assert (await stores[1].get("a", "r1", Peers(ask)))["status"] == "running"
    stores[0].end(path, "done")
    assert (await stores[1].get("a", "r1", Peers(ask)))["status"] == "done"
    for account, wanted in (("b", "r1"), ("b", "never")):
        with pytest.raises(NotFound):
            await stores[1].get(account, wanted, Peers(ask))
    assert asked == [("path", {"account": a, "id": i}) for a, i in (*[("a", "r1")] * 2, ("b", "r1"), ("b", "never"))]
    await flushed(stores[0])
    assert (await stores[1].get("a", "r1", Peers(ask)))["status"] == "done" and len(asked) == 4
    for store in stores:
        store.close()


async def test_another_accounts_request_is_answered_like_one_that_never_was(file):
    store = PathStore(file)
    running, ended = store.begin("running", "a", "m"), store.begin("ended", "a", "m")
    store.end(ended, "done")
    await flushed(store)
    errors = []
    for wanted in ("running", "ended", "never", "", "x" * 5000):
        with pytest.raises(NotFound) as told:
            await store.get("b", wanted, ALONE)
        errors.append((told.value.status, told.value.message))
    assert len(set(errors)) == 1 and errors[0][0] == 404
    # And by the same steps: every look-up reads the file first, whatever is in memory.
    source = inspect.getsource(PathStore.find)
    assert source.index("self._read") < source.index("self._running") < source.index("self._ended")
    store.end(running, "left")
    store.close()


async def test_generations_of_one_request_share_a_path(file):
    store = PathStore(file)
    first, second = store.begin("r", "a", "m"), store.begin("r", "a", "m")
    assert first is second
    store.end(first, "done")
    assert (await store.get("a", "r", ALONE))["status"] == "running"
    store.end(second, "failed")
    assert (await store.get("a", "r", ALONE))["status"] == "failed"
    store.close()


async def test_memory_and_disk_are_bounded(file):
    store = PathStore(file, max_count=50)
    path = store.begin("many", "a", "m")
    for _ in range(10 * MAX_EVENTS):
        path.event("e")
    store.end(path, "done")
    assert len((await store.get("a", "many", ALONE))["events"]) == MAX_EVENTS
    for i in range(300):
        store.end(store.begin(f"r{i}", "a", "m"), "done")
        assert len(store._ended) <= 50 and not store._running
    await flushed(store)
    store._flushes = 0
    store.end(store.begin("last", "a", "m"), "done")
    await flushed(store)
    with store._lock:
        assert store._open().execute("SELECT count(*) FROM paths").fetchone()[0] <= 50
    assert (await store.get("a", "last", ALONE))["status"] == "done"
    store.close()


async def test_requests_without_an_id_are_not_kept(file):
    store = PathStore(file)
    store.end(store.begin("", "a", "m"), "done")
    assert not store._running and not store._ended
    with pytest.raises(NotFound):
        await store.get("a", "", ALONE)
    store.close()
