"""Two gateways on two nodes, with one store between them."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from serve_app.api.errors import NotFound, RateLimited
from serve_app.state.callers.accounts import Caller, hash_key
from serve_app.state.errors import StateError
from serve_app.state.store.sql import SqlStore
from tests.state.gateways import OWN, Gateways, who
from tests.waiting import until


@pytest.fixture
def gateways(database, tmp_path):
    with Gateways(database, tmp_path) as made:
        yield made


async def test_a_key_is_added_on_one_and_used_and_revoked_on_the_other(gateways, open_store):
    one, two = gateways.make("one"), gateways.make("two")
    await one.start()
    await two.start()
    store = open_store("elsewhere")
    key = store.accounts.add("team-a", weight=2)
    for state in (one, two):
        await until(lambda state=state: who(state.accounts.find(key)) == ("team-a", 2.0, "realtime"))
    store.accounts.remove("team-a", hash_key(key)[:12])
    for state in (one, two):
        await until(lambda state=state: state.accounts.find(key) is None)
    assert who(one.accounts.find(OWN)) == ("local", 1.0, "realtime")


async def test_a_gateway_asks_often_enough_for_a_change_to_be_known_in_a_second(gateways):
    """By its own clock: how long it lies between two looks at what has changed."""
    state = gateways.make("one")
    looks: list[float] = []
    look = state._store.revisions
    state._store.revisions = lambda: (looks.append(time.thread_time()), look())[1]
    await state.start()
    before = time.monotonic()
    await until(lambda: len(looks) > 5)
    # On a machine that is not held up they come each quarter of a second, and never sooner.
    assert time.monotonic() - before > 0.8
    state.close()


async def test_what_is_decided_for_every_request_asks_no_store(gateways, open_store):
    """The thread that runs requests touches no database, whatever it does with keys, limits, traces and answers."""
    key = open_store("elsewhere").accounts.add("team-a")
    state = gateways.make("one", rate_limits={"t": 5})
    await state.start()
    touched: list[str] = []
    database = state._store.database
    transaction = database._transaction

    def watched(**how):
        touched.append(threading.current_thread().name)
        return transaction(**how)

    database._transaction = watched
    here = threading.current_thread().name
    for n in range(50):
        assert state.accounts.find(key).account == "team-a"
        trace = state.traces.begin(f"r{n}", "team-a", "m")
        try:
            await state.allowance.request(Caller("team-a"), "t")
        except RateLimited:
            assert n >= 5
        state.traces.end(trace, "done")
    body = {"id": "resp_1", "previous_response_id": None}
    await state.responses.put("team-a", body, [])
    assert await state.responses.get("team-a", "resp_1") == body
    assert await state.responses.conversation("team-a", "resp_1") == []
    await gateways.settled()
    assert (await state.traces.get("team-a", "r7"))["status"] == "done"
    assert touched and here not in touched


async def test_limits_are_counted_together(gateways):
    one, two = (gateways.make(node, rate_limits={"t": 100}) for node in ("one", "two"))
    await one.start()
    await two.start()
    for _ in range(70):
        await one.allowance.request(Caller("a"), "t")
    told = [(await two.allowance.request(Caller("a"), "t"))["Ratelimit"] for _ in range(30)]
    assert '"t";r=0;' in told[-1]
    for state in (one, two):
        with pytest.raises(RateLimited):
            await state.allowance.request(Caller("a"), "t")


async def test_a_file_that_is_removed_is_waited_for_and_another_one_is_opened(tmp_path):
    file = tmp_path / "shared" / "state.sqlite3"
    with Gateways(f"sqlite:///{file}", tmp_path) as gateways, SqlStore(tmp_path / "cli", f"sqlite:///{file}") as store:
        key = store.accounts.add("team-a")
        copy = tmp_path / "copy"
        with closing(sqlite3.connect(file)) as db, closing(sqlite3.connect(copy)) as other:
            db.backup(other)
        later = store.accounts.add("team-b")
        one, two = gateways.make("one"), gateways.make("two")
        await one.start()
        await two.start()
        await one.responses.put("team-a", {"id": "resp_before", "previous_response_id": None}, [])
        file.unlink()
        await until(lambda: one.health()["status"] == two.health()["status"] == "away")
        assert "put it back" in one.counters()["problem"]
        # What is known is served, and what is written waits.
        assert who(one.accounts.find(key)) == ("team-a", 1.0, "realtime")
        assert who(two.accounts.find(later)) == ("team-b", 1.0, "realtime")
        await one.responses.put("team-a", {"id": "resp_1", "previous_response_id": None}, [])
        assert one.counters()["waiting"] == 1 and not file.exists()
        os.replace(copy, file)
        await gateways.settled()
        # As the copy has it, which may have counted as many changes as the file that is gone.
        await until(lambda: one.accounts.find(later) is None and two.accounts.find(later) is None)
        assert who(two.accounts.find(key)) == ("team-a", 1.0, "realtime")
        assert (await two.responses.get("team-a", "resp_1"))["id"] == "resp_1"


async def test_the_store_goes_away_and_comes_back(gateways, open_store):
    store = open_store("elsewhere")
    key = store.accounts.add("team-a")
    one, two = (gateways.make(node, rate_limits={"t": 5}) for node in ("one", "two"))
    await one.start()
    await two.start()
    assert one.health() == {"status": "ready"}
    gateways.lose()
    await until(lambda: one.health()["status"] == two.health()["status"] == "away")
    assert one.counters()["problem"].endswith("the test took it away")
    # Keys, limits and weights go on as they were known.
    assert who(one.accounts.find(key)) == ("team-a", 1.0, "realtime")
    for _ in range(5):
        await one.allowance.request(Caller("team-a"), "t")
    with pytest.raises(RateLimited):
        await one.allowance.request(Caller("team-a"), "t")
    bodies = [{"id": f"resp_{n}", "previous_response_id": None} for n in range(20)]
    # Each waits a second for the store.
    await asyncio.gather(*(one.responses.put("team-b", body, []) for body in bodies))
    for n in range(20):
        one.traces.end(one.traces.begin(f"r{n}", "team-b", "m"), "done")
    told = one.counters()
    assert told["waiting"] == 40 and told["lost"] == 0
    await one.responses.put("team-a", {"id": "resp_a", "previous_response_id": None}, [])
    # What is away is the test's doing: the command line changes the store meanwhile.
    store.accounts.remove("team-a")
    assert one.accounts.find(key) is not None
    gateways.find()
    await gateways.settled()
    await until(lambda: one.accounts.find(key) is None and two.accounts.find(key) is None)
    for n in range(20):
        assert (await two.responses.get("team-b", f"resp_{n}"))["id"] == f"resp_{n}"
        assert (await two.traces.get("team-b", f"r{n}"))["status"] == "done"
    # What waited for an account that has been removed is not written.
    with pytest.raises(NotFound):
        await two.responses.get("team-a", "resp_a")
    assert one.counters()["journal_bytes"] == 0 and one.health() == {"status": "ready"}


async def test_a_gateway_that_starts_without_the_store_serves_the_key_of_the_settings(gateways, open_store):
    key = open_store("elsewhere").accounts.add("team-a")
    state = gateways.make("one")
    gateways.lose()
    await state.start()
    assert who(state.accounts.find(OWN)) == ("local", 1.0, "realtime")
    assert state.accounts.find(key) is None and state.accounts.blind
    gateways.find()
    await until(lambda: not state.accounts.blind)
    assert who(state.accounts.find(key)) == ("team-a", 1.0, "realtime")


async def test_a_gateway_that_ends_leaves_nothing_behind(gateways):
    one, two = gateways.make("one"), gateways.make("one")
    await one.start()
    await two.start()
    one.traces.end(one.traces.begin("r1", "a", "m"), "done")
    await asyncio.to_thread(one.close)
    assert (await two.traces.get("a", "r1"))["status"] == "done"
    # And where the store is away, what waits is the other's.
    three = gateways.make("one")
    await three.start()
    gateways.lose()
    three.traces.end(three.traces.begin("r2", "a", "m"), "done")
    await asyncio.to_thread(three.close)
    gateways.find()
    two._adopted_at = float("-inf")
    await gateways.settled(two)
    await until(lambda: two._store.traces.body("a", "r2") is not None)


async def test_a_store_that_must_not_be_used_stops_the_start(gateways, store):
    with store.database.unprepared() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        connection.exec_driver_sql("DELETE FROM schema_programs")
    with pytest.raises(StateError, match="newer"):
        await gateways.make("one").start()
