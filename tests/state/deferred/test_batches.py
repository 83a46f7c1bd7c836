"""Batches in the store, the same on a file and on a server: every request has one result and is charged once."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from serve_app.state.callers.accounts import Caller
from serve_app.state.callers.limits import Limits
from serve_app.state.deferred.batches import (
    Batch,
    BatchStore,
    Claim,
    Counts,
    Request,
    Result,
    Shard,
    ShardResults,
    Used,
    pack,
    unpack,
)
from serve_app.state.errors import QueueFull
from serve_app.state.spending.ledger import Entry
from serve_app.state.store.deferred.batch_shards import columns_of
from serve_app.state.store.deferred.batch_tables import batch_results, batch_shards, batches
from serve_app.state.store.sql import SqlStore
from serve_app.state.store.tables import ledger

CALLER = Caller("a", 2.0, "batch", "key", limits=Limits(streams=3))
BATCH = Batch("b", "openai", CALLER, created=10.0, deadline=1000.0, keep_s=50.0, about=b'{"x":1}', input="in")
USED = Used(10, 4, 2, 7, 9, "USD")


def accept(
    store: BatchStore, batch_id: str = "b", *, shards: int = 2, size: int = 3, wrong: int = 0, **fields
) -> Batch:
    """A batch that is checked: `shards` of `size` requests each, and some that can't be run behind them."""
    account = fields.pop("account", "a")
    batch = replace(BATCH, id=batch_id, caller=replace(CALLER, account=account), **fields)
    store.create(batch, "door", batch.created + 9)
    cut = [Shard(n, f"m{n % 2}", f"batches/{batch_id}/shards/{n:06}", size) for n in range(shards)]
    bad = [Result(shards * size + n, None, "failed", 400, b"{}") for n in range(wrong)]
    assert store.planned("door", batch_id, cut, bad, batch.created)
    return batch


def result(claim: Claim, number: int, *, body: bytes = b"{}", used: Used = USED) -> Result:
    return Result(number, f"c{number}", "succeeded", 200, body, f"{claim.batch.id}.{number}", used)


def entry(claim: Claim, number: int) -> Entry:
    units = {"input_tokens": 10, "output_tokens": 2}
    return Entry(
        f"{claim.batch.id}.{number}", "a", "key", 12.0, 1.0, claim.shard.model, "t", "done", units, 7, 9, "USD",
        batch=claim.batch.id,
    )  # fmt: skip


def part(claim: Claim, *numbers: int, body: bytes = b"{}") -> ShardResults:
    results = [result(claim, number, body=body) for number in numbers]
    return ShardResults(
        claim.batch.id, claim.shard.number, claim.epoch, results, [entry(claim, number).row() for number in numbers]
    )


def numbers(claim: Claim, size: int = 3) -> range:
    return range(claim.shard.number * size, (claim.shard.number + 1) * size)


def run_all(store: BatchStore, owner: str, now: float, models: tuple[str, ...] = ("m0", "m1")) -> None:
    while claims := store.claim(owner, now, now + 5, models, 8):
        for claim in claims:
            assert store.write(owner, [part(claim, *numbers(claim, claim.shard.requests))]) == set()
            assert store.finish(owner, claim.batch.id, claim.shard.number, claim.epoch, now)


def charged(store: SqlStore, account: str = "a") -> list[str]:
    with store.database.reading() as connection:
        return sorted(connection.execute(sa.select(ledger.c.id).where(ledger.c.account == account)).scalars())


def test_requests_are_packed_and_read_again():
    made = [Request(0, "x", "/v1/chat/completions", b'{"a":1}'), Request(7, None, "/v1/embeddings", b"{}")]
    assert unpack(pack(made)) == made


def test_a_batch_goes_from_its_acceptance_to_its_end(store):
    rooms = store.batches
    batch = accept(rooms, wrong=1)
    found = rooms.find("a", "b")
    assert found == replace(batch, status="queued", counts=Counts(7, failed=1))
    assert rooms.find("x", "b") is None and rooms.find("a", "c") is None
    assert (
        rooms.busy()
        and rooms.left("a") == 6
        and {m: w.requests for m, w in rooms.waiting().items()} == {"m0": 3, "m1": 3}
    )
    run_all(rooms, "one", 20.0)
    found = rooms.find("a", "b")
    assert (found.status, found.started, found.finalizing) == ("finalizing", 20.0, 20.0)
    assert found.counts == Counts(7, 6, 1) and found.used == Used(60, 24, 12, 42, 54, "USD")
    assert charged(store) == [f"b.{n}" for n in range(6)]
    assert rooms.claim_end("one", 21.0, 25.0).id == "b" and rooms.claim_end("two", 21.0, 25.0) is None
    assert [r.number for r in rooms.results("b", 1, 3)] == [2, 3, 4] and rooms.results("b", 5)[0].outcome == "failed"
    assert rooms.end("two", "b", "out", "err", 22.0) is None
    ended = rooms.end("one", "b", "out", "err", 22.0)
    assert (ended.status, ended.output, ended.errors, ended.ended) == ("completed", "out", "err", 22.0)
    assert rooms.busy() and rooms.uncleared() == ["b"] and len(rooms.shards("b")) == 2 and rooms.left("a") == 0
    assert rooms.delete("a", "b") is None
    rooms.clear("b")
    assert not rooms.busy() and rooms.uncleared() == [] and rooms.results("b") == [] and rooms.shards("b") == []
    assert rooms.find("a", "b") == ended and rooms.old(71.0) == [] and rooms.old(72.0) == [ended]
    assert rooms.delete("x", "b") is None and rooms.delete("a", "b") == ended and rooms.find("a", "b") is None


def test_whoever_lost_its_claim_writes_nothing(store, open_store):
    one, two = store.batches, open_store("elsewhere").batches
    accept(one, shards=1)
    [old] = one.claim("one", 20.0, 25.0, ["m0"], 9)
    assert one.write("one", [part(old, 0)]) == set() and two.claim("two", 24.9, 30.0, ["m0"], 9) == []
    [new] = two.claim("two", 25.0, 30.0, ["m0"], 9)
    assert (old.epoch, new.epoch, new.done) == (1, 2, 1) and two.done("b", range(3)) == {0}
    assert [(held.epoch, held.ends) for held in two.renew("two", 26.0, 31.0)] == [(2, False)]
    assert one.renew("one", 26.0, 31.0) == []
    # The first one is back: neither a result of its own nor an entry, and the shard is not its to finish.
    assert one.write("one", [part(old, 1)]) == {("b", 0)} and one.results("b")[1:] == [] and charged(store) == ["b.0"]
    assert not one.finish("one", "b", 0, old.epoch, 26.0) and not one.finish("two", "b", 0, old.epoch, 26.0)
    one.give_back("one", "b", 0, old.epoch)
    # A name that comes back with an old epoch is no better.
    assert two.write("two", [replace(part(old, 1), epoch=1)]) == {("b", 0)}
    assert two.write("two", [part(new, 1, 2)]) == set() and two.finish("two", "b", 0, 2, 27.0)
    assert one.find("a", "b").counts == Counts(3, 3) and charged(store) == ["b.0", "b.1", "b.2"]


def test_a_request_that_runs_twice_has_one_result_and_is_charged_once(store):
    rooms = store.batches
    accept(rooms, shards=1)
    [claim] = rooms.claim("one", 20.0, 25.0, ["m0"], 9)
    for body in (b'{"first":1}', b'{"second":1}'):
        assert rooms.write("one", [part(claim, 0, 1, body=body)]) == set()
    found = rooms.find("a", "b")
    assert found.counts == Counts(3, 2) and found.used.neurons == 14 and charged(store) == ["b.0", "b.1"]
    assert [r.body for r in rooms.results("b")] == [b'{"first":1}'] * 2
    assert not rooms.finish("one", "b", 0, claim.epoch, 21.0) and rooms.find("a", "b").status == "running"


def test_results_and_entries_are_written_together_or_not_at_all(store, monkeypatch):
    rooms = store.batches
    accept(rooms, shards=1)
    [claim] = rooms.claim("one", 20.0, 25.0, ["m0"], 9)

    def fails(*_: object) -> None:
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(store.ledger, "write", fails)
        rooms.write("one", [part(claim, 0)])
    assert rooms.results("b") == [] and rooms.find("a", "b").counts == Counts(3) and charged(store) == []
    assert rooms.write("one", [part(claim, 0)]) == set() and charged(store) == ["b.0"]


def test_claims_are_fair_between_accounts_and_go_by_deadline(store):
    rooms = store.batches
    accept(rooms, "big", shards=9, deadline=900.0)
    accept(rooms, "urgent", shards=1, deadline=500.0)
    accept(rooms, "small", shards=2, account="other", deadline=950.0)
    claims = rooms.claim("one", 20.0, 25.0, ["m0", "m1"], 5)
    assert [(c.batch.id, c.shard.number) for c in claims] == [
        ("urgent", 0), ("small", 0), ("big", 0), ("small", 1), ("big", 1),
    ]  # fmt: skip
    # Who has the fewest claims comes first, whoever holds them; and only models that are asked for.
    accept(rooms, "late", shards=1, account="new", deadline=990.0)
    claims = rooms.claim("two", 20.0, 25.0, ["m0"], 2)
    assert [(c.batch.id, c.shard.number) for c in claims] == [("late", 0), ("big", 2)]
    assert rooms.claim("two", 20.0, 25.0, ["m7"], 2) == []


@pytest.mark.parametrize("working", [False, True])
def test_a_cancelled_batch_gives_what_is_done(store, working):
    rooms = store.batches
    accept(rooms)
    claims = rooms.claim("one", 20.0, 25.0, ["m0"], 1)
    rooms.write("one", [part(claims[0], 0)])
    assert rooms.cancel("x", "b", 21.0) is None and rooms.cancel("a", "b", 21.0).status == "cancelling"
    assert rooms.claim("two", 21.0, 25.0, ["m0", "m1"], 9) == [] and rooms.claim_end("two", 21.0, 25.0) is None
    if working:
        # Its runner hears of it, writes what it has, and closes its shard.
        assert [held.ends for held in rooms.renew("one", 22.0, 27.0)] == [True]
        assert rooms.write("one", [part(claims[0], 1)]) == set() and rooms.finish("one", "b", 0, 1, 22.0)
        assert rooms.find("a", "b").counts == Counts(6, 2, cancelled=1)
        found = rooms.claim_end("two", 22.0, 27.0)
        assert found.counts == Counts(6, 2, cancelled=4)
    else:
        found = rooms.claim_end("two", 25.0, 30.0)
        assert found.counts == Counts(6, 1, cancelled=5)
        assert rooms.write("one", [part(claims[0], 1)]) == {("b", 0)}
    assert rooms.end("two", "b", "o", "e", 31.0).status == "cancelled"
    assert rooms.cancel("a", "b", 32.0).status == "cancelled" and rooms.find("a", "b").cancelling == 21.0


def test_what_is_late_expires(store):
    rooms = store.batches
    accept(rooms)
    [claim] = rooms.claim("one", 999.0, 1005.0, ["m0"], 1)
    rooms.write("one", [part(claim, 0)])
    assert rooms.claim("two", 1000.0, 1005.0, ["m0", "m1"], 9) == [] and rooms.claim_end("two", 1000.0, 1005.0) is None
    assert [held.ends for held in rooms.renew("one", 1000.0, 1005.0)] == [True]
    assert rooms.finish("one", "b", 0, 1, 1000.0)
    assert rooms.claim_end("two", 1001.0, 1006.0).counts == Counts(6, 1, expired=5)
    assert rooms.end("two", "b", "o", "e", 1002.0).status == "expired"


def test_inputs_are_checked_by_one_and_taken_over(store, open_store):
    one, two = store.batches, open_store("elsewhere").batches
    for name, deadline in (("later", 900.0), ("sooner", 800.0)):
        one.create(replace(BATCH, id=name, deadline=deadline, counts=Counts(5)))
    with pytest.raises(ValueError):
        one.create(replace(BATCH, id="later"))
    assert one.waiting()[""].requests == 2 and one.left("a") == 10
    assert one.claim_input("one", 20.0, 25.0).id == "sooner" and two.claim_input("two", 20.0, 25.0).id == "later"
    assert two.claim_input("two", 20.0, 25.0) is None
    one.renew("one", 24.0, 29.0)
    assert one.claim_input("one", 25.0, 30.0).id == "later"
    assert two.claim_input("three", 25.0, 30.0) is None  # `sooner` is checked until 29
    one.create(replace(BATCH, id="soonest", deadline=700.0), "door", 28.0)
    assert two.claim_input("three", 25.0, 30.0) is None and two.claim_input("three", 28.0, 30.0).id == "soonest"
    assert not two.planned("two", "later", [Shard(0, "m", "s", 1)], [], 26.0) and not two.refused(
        "two", "later", b"", 26.0
    )
    assert one.refused("one", "later", b'["x"]', 26.0) and one.find("a", "later").problems == b'["x"]'
    assert one.find("a", "later").status == "failed" and one.left("a") == 5
    # Cancelled before it was cut: nothing of it is run.
    one.cancel("a", "sooner", 27.0)
    assert not one.planned("one", "sooner", [Shard(0, "m", "s", 5)], [], 28.0)
    assert two.claim_end("two", 28.0, 30.0).counts == Counts(5, cancelled=5)
    two.release("two")
    assert one.claim_end("one", 28.0, 30.0).id == "sooner"


def test_an_account_has_so_many_requests_at_once(store):
    rooms = store.batches
    rooms.max_left = 10
    accept(rooms, "one", shards=2, size=6)
    with pytest.raises(QueueFull, match="12 requests"):
        rooms.create(replace(BATCH, id="two", counts=Counts(1)))
    rooms.create(replace(BATCH, id="other", caller=Caller("other"), counts=Counts(1)))
    run_all(rooms, "one", 20.0)
    rooms.create(replace(BATCH, id="two", counts=Counts(10)))


def test_a_runner_that_ends_leaves_its_work_to_others(store):
    rooms = store.batches
    accept(rooms)
    [one, two] = rooms.claim("one", 20.0, 25.0, ["m0", "m1"], 9)
    rooms.give_back("one", "b", one.shard.number, one.epoch)
    assert [c.epoch for c in rooms.claim("two", 20.0, 25.0, ["m0", "m1"], 9)] == [2]
    rooms.release("one")
    assert [(c.shard.number, c.epoch) for c in rooms.claim("two", 20.0, 25.0, ["m0", "m1"], 9)] == [
        (two.shard.number, 2)
    ]


def test_runners_at_once_share_the_work(open_store):
    """Real threads, each with a store of its own; some come back late with claims that are no longer theirs."""
    first = open_store()
    accept(first.batches, shards=8, size=3, deadline=time.time() + 900, created=time.time())

    def work(seed: int) -> None:
        draws, rooms = random.Random(seed), open_store(f"runner-{seed}").batches
        owner = f"runner-{seed}"
        while first.batches.find("a", "b").status != "finalizing":
            now = time.time()
            for claim in rooms.claim(owner, now, now + draws.choice((0.0, 0.5)), ["m0", "m1"], 2):
                left = sorted(set(numbers(claim)) - rooms.done("b", numbers(claim)))
                for number in left:
                    rooms.write(owner, [part(claim, number)])
                rooms.finish(owner, "b", claim.shard.number, claim.epoch, now)

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, range(3)))
    found = first.batches.find("a", "b")
    assert found.counts == Counts(24, 24) and found.used.neurons == 24 * 7
    assert len(first.batches.results("b")) == 24 and len(charged(first)) == 24


def test_a_poll_is_one_look_up_by_key(store):
    """However many there are: databases choose otherwise where there are few."""
    with store.database.writing() as connection:
        columns = columns_of(BATCH)
        connection.execute(sa.insert(batches), [{**columns, "id": f"b{n}"} for n in range(2000)])
    if not store.database.is_sqlite:
        with store.database.writing() as connection:
            connection.exec_driver_sql("ANALYZE batches")
    seen: list[tuple] = []
    sa.event.listen(store.database.engine, "before_cursor_execute", lambda *call: seen.append((call[2], call[3])))
    assert store.batches.find("a", "b7").id == "b7"
    [(statement, parameters)] = [one for one in seen if one[0].startswith("SELECT")]
    with store.database.reading() as connection:
        explain = "EXPLAIN QUERY PLAN " if store.database.is_sqlite else "EXPLAIN "
        plan = " ".join(str(row) for row in connection.exec_driver_sql(explain + statement, parameters))
    assert ("sqlite_autoindex_batches_1 (id=?)" in plan) or ("batches_pkey" in plan and "Index Cond" in plan), plan
    assert "SCAN" not in plan and "Seq Scan" not in plan


def test_what_runners_ask_reads_what_is_open_alone(store):
    """However many batches have ended: plans on SQLite, which has no statistics to be mistaken by."""
    if not store.database.is_sqlite:
        pytest.skip("its planner goes by the number of rows")
    rooms = store.batches
    accept(rooms)
    seen: list[tuple] = []
    sa.event.listen(store.database.engine, "before_cursor_execute", lambda *call: seen.append((call[2], call[3])))
    claims = rooms.claim("one", 20.0, 25.0, ["m0"], 1)
    rooms.renew("one", 20.0, 25.0)
    rooms.write("one", [part(claims[0], 0)])
    rooms.finish("one", "b", 0, 1, 20.0)
    for ask in (rooms.busy, rooms.waiting, rooms.uncleared):
        ask()
    rooms.claim_end("one", 20.0, 25.0)
    rooms.claim_input("one", 20.0, 25.0)
    rooms.left("a")
    rooms.old(20.0)
    rooms.release("one")
    plans = set()
    with store.database.reading() as connection:
        for statement, parameters in seen:
            if statement.startswith(("SELECT", "UPDATE")) and "batch" in statement:
                plans |= {row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)}
    whole = {plan for plan in plans if plan.startswith("SCAN") and "INDEX" not in plan and "CONSTANT" not in plan}
    assert len(plans) > 5 and not whole, whole


def test_pages_go_through_all_batches_in_both_directions(store):
    rooms = store.batches
    draws = random.Random(7)
    made = [
        replace(BATCH, id=f"{n:03}", created=float(n // 3), door=draws.choice(["openai", "anthropic"]))
        for n in range(50)
    ]
    for batch in draws.sample(made, len(made)):
        rooms.create(batch)
    rooms.create(replace(BATCH, id="other", caller=Caller("other")))
    newest = [batch.id for batch in reversed(made)]
    found: list[str] = []
    while page := rooms.page("a", after=found[-1] if found else "", limit=7):
        found += [batch.id for batch in page]
    assert found == newest
    assert [b.id for b in rooms.page("a", before=newest[30], limit=8)] == newest[22:30]
    of_door = [batch.id for batch in reversed(made) if batch.door == "openai"]
    assert [b.id for b in rooms.page("a", ["openai"], limit=99)] == of_door
    assert rooms.page("a", after="unknown") == [] and rooms.page("a", after="other") == []


def test_clearing_leaves_nothing_behind(store, monkeypatch):
    monkeypatch.setattr("serve_app.state.store.deferred.batches._GROUP", 4)
    rooms: BatchStore = store.batches
    accept(rooms, shards=4)
    run_all(rooms, "one", 20.0)
    rooms.claim_end("one", 20.0, 25.0)
    rooms.end("one", "b", "o", "", 21.0)
    rooms.clear("b")
    with store.database.reading() as connection:
        for table, count in ((batch_results, 0), (batch_shards, 0), (batches, 1)):
            assert connection.execute(sa.select(sa.func.count()).select_from(table)).scalar() == count
    rooms.clear("b")
    assert rooms.old(71.0) != []
