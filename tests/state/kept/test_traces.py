"""Traces of requests: own ones only, bounded, shared between gateways."""

from __future__ import annotations

import inspect

import pytest

from serve_app.api.errors import NotFound, StoreAway
from serve_app.state.kept import traces
from serve_app.state.kept.traces import MAX_EVENTS, Traces
from serve_app.state.store.kept.traces import TraceTable
from tests.state.gateways import Gateways
from tests.waiting import until


@pytest.fixture
def gateways(database, tmp_path):
    with Gateways(database, tmp_path) as made:
        yield made


async def test_a_trace_is_there_while_it_runs_and_afterwards_also_at_another_gateway(gateways):
    state = gateways.make("one")
    await state.start()
    own, other = state.traces, gateways.make("two").traces
    trace = own.begin("r1", "a", "m")
    trace.event("received", prompt_tokens=7, nothing=None)
    running = await own.get("a", "r1")
    assert running["status"] == "running" and running["model"] == "m"
    assert running["events"] == [{"event": "received", "ms": running["events"][0]["ms"], "prompt_tokens": 7}]
    own.end(trace, "done", completion_tokens=3)
    just_ended = await own.get("a", "r1")
    assert just_ended["status"] == "done" and just_ended["events"][-1]["completion_tokens"] == 3
    await gateways.settled(state)
    assert await other.get("a", "r1") == await own.get("a", "r1") == just_ended
    assert not own._running


async def test_one_that_takes_long_is_known_elsewhere_while_it_runs(gateways, monkeypatch):
    monkeypatch.setattr(traces, "LONG_S", 0.0)
    state, elsewhere = gateways.make("one"), gateways.make("two")
    await state.start()
    trace = state.traces.begin("r1", "a", "m")
    await until(lambda: trace.shown)
    await gateways.settled(state)
    assert (await elsewhere.traces.get("a", "r1"))["status"] == "running"
    # Shown once: what happens later is known when it has ended.
    trace.event("decoded")
    state.traces.end(trace, "done")
    await gateways.settled(state)
    assert [e["event"] for e in (await elsewhere.traces.get("a", "r1"))["events"]] == ["decoded", "done"]


async def test_who_asks_right_after_the_end_at_another_gateway_waits_for_it(gateways):
    """A client asks right after its answer, and a proxy sends it to another gateway."""
    state, elsewhere = gateways.make("one"), gateways.make("two")
    await state.start()
    await elsewhere.start()
    looks = []
    look = elsewhere._store.traces.body
    # The first look comes too early, however fast the other gateway is.
    elsewhere._store.traces.body = lambda *asked: look(*asked) if looks else looks.append(asked)
    state.traces.end(state.traces.begin("r1", "a", "m"), "done")
    await gateways.settled(state)
    assert (await elsewhere.traces.get("a", "r1"))["status"] == "done" and looks == [("a", "r1")]


async def test_a_gateway_that_comes_back_too_late_changes_no_trace_of_a_good_end(gateways):
    """It had a stream that another has taken over and ended: for itself, its client has left."""
    late, other = gateways.make("one"), gateways.make("two")
    await late.start()
    await other.start()
    begun = late.traces.begin("r1", "a", "m")
    other.traces.end(other.traces.begin("r1", "a", "m"), "done", completion_tokens=3)
    await gateways.settled(other)
    late.traces.end(begun, "left", completion_tokens=1)
    await gateways.settled(late)
    found = await other.traces.get("a", "r1")
    assert (found["status"], found["events"][-1]["completion_tokens"]) == ("done", 3)
    # What did not end well may be told again.
    for status in ("left", "failed", "done"):
        late.traces.end(late.traces.begin("r2", "a", "m"), status)
        await gateways.settled(late)
        assert (await other.traces.get("a", "r2"))["status"] == status


async def test_another_accounts_request_is_answered_like_one_that_never_was(gateways):
    state = gateways.make("one")
    await state.start()
    own = state.traces
    running, ended = own.begin("running", "a", "m"), own.begin("ended", "a", "m")
    own.end(ended, "done")
    await gateways.settled(state)
    errors = []
    for wanted in ("running", "ended", "never", "", "\0", "x" * 5000):
        with pytest.raises(NotFound) as told:
            await own.get("b", wanted)
        errors.append((told.value.status, told.value.message))
    assert len(set(errors)) == 1 and errors[0][0] == 404
    # And by the same steps: every look-up asks the store first, whatever is in memory.
    source = inspect.getsource(Traces._find)
    assert source.index("self._store.body") < source.index("self._running") < source.index("self._writer")
    own.end(running, "left")


async def test_generations_of_one_request_share_a_trace(gateways):
    own = gateways.make("one").traces
    first, second = own.begin("r", "a", "m"), own.begin("r", "a", "m")
    assert first is second
    own.end(first, "done")
    assert (await own.get("a", "r"))["status"] == "running"
    own.end(second, "failed")
    assert (await own.get("a", "r"))["status"] == "failed"


async def test_while_the_store_is_away_own_traces_are_there_and_others_are_neither_there_nor_gone(gateways):
    state, elsewhere = gateways.make("one"), gateways.make("two")
    await state.start()
    await elsewhere.start()
    gateways.lose()
    state.traces.end(state.traces.begin("r1", "a", "m"), "done")
    assert (await state.traces.get("a", "r1"))["status"] == "done"
    with pytest.raises(StoreAway):
        await elsewhere.traces.get("a", "r1")
    gateways.find()
    await gateways.settled()
    assert (await elsewhere.traces.get("a", "r1"))["status"] == "done"


async def test_events_are_bounded_and_requests_without_an_id_are_not_kept(gateways):
    state = gateways.make("one")
    own = state.traces
    trace = own.begin("many", "a", "m")
    for _ in range(10 * MAX_EVENTS):
        trace.event("e")
    own.end(trace, "done")
    assert len((await own.get("a", "many"))["events"]) == MAX_EVENTS
    own.end(own.begin("", "a", "m"), "done")
    assert not own._running and state.counters()["waiting"] == 1
    with pytest.raises(NotFound):
        await own.get("a", "")


def test_the_newest_are_kept(store):
    table = TraceTable(store.database, max_count=50)
    for n in range(100):
        with store.database.writing() as connection:
            table.write(connection, [{"account": "a", "id": f"r{n}", "ended": float(n), "body": b"{}"}])
    alive = [table.body("a", f"r{n}") is not None for n in range(100)]
    assert alive == sorted(alive) and alive[-1] and sum(alive) <= 50 + TraceTable.TRIM_EVERY
