"""Where requests go."""

import pytest

from serve_app.costs.transfers import FetchSample
from serve_app.routing.types import Decision
from tests.routing.fleets import CHUNK, load, request, router


def place(r, req, now=0.0) -> Decision:
    decision = r.choose(req, now)
    r.commit(req, decision, now)
    return decision


def test_without_workers_there_is_no_choice() -> None:
    r = router()
    assert r.choose(request(), 0.0) is None
    r.report(load("b"))
    assert r.choose(request(), 0.0).decode == "b"
    r.remove("b")
    assert r.choose(request(), 0.0) is None


def test_a_lone_worker_does_both_whatever_its_role() -> None:
    for strict in (False, True):
        r = router(load("a", "decode"), strict_roles=strict)
        assert r.choose(request(), 0.0).prefill is None


def test_roles_are_followed_where_nothing_speaks_against_it() -> None:
    r = router(load("p", "prefill"), load("d", "decode", running=10, kv_blocks_used=1000))
    decision = r.choose(request(prompt=4000), 0.0)
    assert (decision.prefill, decision.decode) == ("p", "d")
    assert decision.ttft > 0 and decision.itl > 0 and decision.uncached == 4000


def test_a_prompt_goes_to_a_decode_worker_when_prefill_is_far_behind() -> None:
    r = router(load("p", "prefill", queued_prefill_tokens=400_000), load("d", "decode", running=2))
    decision = r.choose(request(), 0.0)
    assert (decision.prefill, decision.decode, decision.why) == (None, "d", "prefill behind")


def test_what_is_too_short_to_be_handed_over_is_computed_where_it_is_decoded() -> None:
    r = router(load("p", "prefill"), load("d", "decode"), least_handover=64)
    for prompt, prefill in ((11, None), (64, None), (65, "p"), (500, "p")):
        decision = r.choose(request(prompt=prompt), 0.0)
        assert (decision.prefill, decision.decode) == (prefill, "d")
    # What counts is what nobody holds yet.
    whole = request("a", prompt=5 * CHUNK + 40, talk=1)
    assert r.choose(whole, 0.0).prefill == "p"
    r.commit(whole, r.choose(whole, 0.0), 0.0)
    assert r.choose(request("b", prompt=5 * CHUNK + 40, talk=1), 0.0).prefill is None


def test_a_full_decode_worker_leaves_the_stream_where_it_was_prefilled() -> None:
    full = load("d", "decode", running=64, waiting=30, kv_blocks_used=39_000)
    assert router(load("p", "prefill"), full).choose(request(), 0.0).decode == "p"


def test_a_place_that_many_wait_for_is_left_to_them() -> None:
    # The decode worker is full, and a stream there ends soon; a prefill worker is idle.
    r = router(load("p", "prefill"), load("d", "decode", running=64, kv_blocks_used=4000), ttft=2.0)
    decision = r.choose(request(), 0.0)
    assert decision.decode == "d" and 0.0 < decision.place < 0.25
    r.fleet.waiting = 20
    assert r.choose(request(), 0.0).decode == "p"
    r.fleet.waiting = 0
    assert r.choose(request(), 0.0).decode == "d"


def test_roles_are_kept_more_strictly_the_busier_prefill_is() -> None:
    """A queue that is worth a detour while prefill has idle time is not worth one when prompts always wait."""
    kept = {}
    for busy in (False, True):
        r = router(load("p", "prefill"), load("d", "decode", running=2))
        for tenth in range(1, 600):
            queued = 1000 if busy else 0
            r.report(load("p", "prefill", at=tenth / 10, queued_prefill_tokens=queued))
        r.report(load("p", "prefill", at=60.0, queued_prefill_tokens=7000))
        r.report(load("d", "decode", at=60.0, running=2))
        assert (r.fleet.congestion > 5) == busy
        kept[busy] = r.choose(request(prompt=6000), 60.0).prefill == "p"
    assert kept == {False: False, True: True}


def test_where_memory_is_short_everywhere_roles_cost_nothing() -> None:
    def prefill(used: int) -> str | None:
        r = router()
        for second in range(60):
            r.report(load("p", "prefill", at=float(second), queued_prefill_tokens=1000, kv_blocks_used=used))
            r.report(load("d", "decode", at=float(second), kv_blocks_used=used))
        return r.choose(request(prompt=500, max_tokens=16), 59.0).prefill

    assert prefill(0) == prefill(6_000) == "p"
    # There is still room for the request, in both.
    assert prefill(30_000) is None


def test_where_links_are_busy_a_short_prompt_may_go_against_a_role_for_less() -> None:
    r = router(load("p", "prefill", queued_prefill_tokens=1000), load("d", "decode"))
    assert r.choose(request(prompt=500), 0.0).prefill == "p"
    for worker in r.fleet.workers.values():
        worker.link.take(20.0, 0.0)
        worker.link.queued(0.0, 0.0)
    assert r.choose(request(prompt=500), 0.0).prefill is None


def test_a_prompt_that_is_handed_over_waits_for_room_where_it_is_computed() -> None:
    r = router(load("p", "prefill", kv_blocks_total=300), load("d", "decode", running=2, kv_blocks_used=100))
    assert r.choose(request("a", prompt=6000), 0.0).prefill == "p"
    # Streams there hold nearly all of it.
    full = load("p", "prefill", running=20, kv_blocks_total=300, kv_blocks_used=280, at=1.0)
    r.report(full)
    assert r.choose(request("b", prompt=6000), 1.0).prefill is None
    # Or prompts that are on their way there.
    r.report(load("p", "prefill", kv_blocks_total=300, at=2.0))
    for name in "cdef":
        sent = request(name, prompt=6000)
        decision = r.choose(sent, 2.0)
        r.commit(sent, decision, 2.0)
    assert r.fleet.workers["p"].passing <= 300 * 32
    for name in "cdef":
        r.finished(name)
    assert r.fleet.workers["p"].passing == 0


def test_load_sent_counts_before_any_report_and_is_not_counted_twice() -> None:
    r = router(load("a"), load("b"), split=False)
    seen = [place(r, request(str(i)), 0.0).decode for i in range(6)]
    assert seen.count("a") == seen.count("b") == 3
    waits = {w.name: w.busy_until for w in r.fleet.workers.values()}
    r.report(load("a", at=1.0, queued_prefill_tokens=6000, waiting=3))
    after = r.fleet.workers["a"]
    assert after.batch == 3 and after.busy_until - 1.0 < waits["a"] * 1.5
    for i in range(6):
        r.finished(str(i))
    assert r.fleet.workers["a"].batch == 0 and r.fleet.workers["b"].batch == 0
    assert r.fleet.workers["b"].busy_until == pytest.approx(0.0, abs=1e-6)
    r.finished("never seen")


def test_a_place_is_free_when_its_request_ends_and_not_when_a_report_says_so() -> None:
    r = router(load("a"))
    for i in range(2):
        place(r, request(str(i)), 0.0)
    worker = r.fleet.workers["a"]
    r.report(load("a", at=1.0, running=5, kv_blocks_used=200))  # three are another gateway's
    step, kv = worker.step, worker.kv_tokens
    r.stream_ended("0")
    assert worker.batch == 4 and worker.kv_tokens < kv and worker.step < step
    r.finished("0")
    assert worker.batch == 4
    # The report was on its way when the request ended: it counts once more until the next.
    r.report(load("a", at=1.1, running=5))
    assert worker.batch == 5
    r.report(load("a", at=1.2, running=3))
    r.finished("1")
    assert worker.batch == 2


def test_what_is_sent_and_has_not_ended_counts_however_long_it_is_on_its_way() -> None:
    r = router(load("a"))
    for i in range(3):
        place(r, request(str(i)), 0.0)
    r.report(load("a", at=10.0))  # none of them is there yet: prompts are computed elsewhere, or calls are slow
    assert r.fleet.workers["a"].batch == 3
    r.report(load("a", at=11.0, running=2, waiting=3))
    assert r.fleet.workers["a"].batch == 5
    r.stream_ended("0")  # its client may still read
    r.stream_ended("0")
    r.report(load("a", at=12.0, running=1))
    assert r.fleet.workers["a"].batch == 2
    for i in range(3):
        r.finished(str(i))
    r.report(load("a", at=13.0, running=1))
    assert r.fleet.workers["a"].batch == 1


def test_a_full_workers_queue_is_as_long_as_all_that_are_in_it() -> None:
    """Places come free one after another, as those that run end; who waits has none to leave."""
    waits = {}
    for queue in (0, 1, 24):
        r = router(load("a", max_seqs=4, running=4, waiting=queue))
        waits[queue] = r.choose(request(prompt=10, max_tokens=20), 0.0).wait
    assert waits[0] > 0 and waits[1] >= 2 * waits[0] and waits[24] >= 25 * waits[0]


def test_cache_that_a_request_on_its_way_will_take_counts_until_the_worker_holds_it() -> None:
    """A decode worker reports nothing of prompts that are computed elsewhere: it would be filled twice over."""
    r = router(load("p", "prefill"), load("d", "decode", kv_blocks_total=400, block_tokens=32), strict_roles=True)
    placed = place(r, request("0", 6000))
    assert (placed.prefill, placed.decode) == ("p", "d")
    held = r.fleet.workers["d"].kv_tokens
    assert held >= 6000
    r.report(load("d", "decode", at=1.0, kv_blocks_total=400, block_tokens=32))
    assert r.fleet.workers["d"].kv_tokens == held
    assert r.choose(request("1", 6800), 1.0).wait > 0  # no room for both
    r.started("0", 0.0)
    r.started("0", 0.0)
    r.report(load("d", "decode", at=2.0, kv_blocks_total=400, block_tokens=32, kv_blocks_used=190, running=1))
    assert r.fleet.workers["d"].kv_tokens == 190 * 32 and r.fleet.workers["d"].coming == 0
    # One that leaves before it started counts no more either.
    place(r, request("2", 1000))
    r.report(load("d", "decode", at=3.0, kv_blocks_total=400, block_tokens=32))
    assert r.fleet.workers["d"].coming > 1000
    r.finished("2")
    assert r.fleet.workers["d"].coming == 0


def test_a_report_older_than_the_last_is_ignored() -> None:
    r = router(load("a", at=5.0, running=7))
    r.report(load("a", at=4.0, running=1))
    assert r.fleet.workers["a"].batch == 7


def test_a_prefix_is_sought_where_it_is_until_its_worker_is_too_busy() -> None:
    r = router(load("a"), load("b"), shared_pool=False, split=False)
    first = place(r, request("1", 8192, talk=1)).decode
    r.finished("1")
    other = "b" if first == "a" else "a"
    again = r.choose(request("2", 8192, talk=1), 10.0)
    assert again.decode == first and again.uncached < 200
    r.report(load(first, at=10.0, queued_prefill_tokens=100_000))
    assert r.choose(request("3", 8192, talk=1), 10.0).decode == other


def test_with_a_shared_pool_a_prefix_ties_nobody_to_a_worker() -> None:
    r = router(load("a"), load("b"), split=False, own_cache=False)
    first = place(r, request("1", 8192, talk=1)).decode
    r.finished("1")
    r.report(load(first, at=10.0, queued_prefill_tokens=20_000))
    again = r.choose(request("2", 8192, talk=1), 10.0)
    assert again.decode != first and again.uncached < 200


def test_another_nodes_pool_is_used_where_that_is_cheaper_than_computing() -> None:
    r = router(load("a", node="n0"), load("b", node="n1"), split=False, own_cache=False)
    first = place(r, request("1", 8192, talk=1)).decode
    r.report(load(first, node=r.fleet.workers[first].load.node, at=9.0, queued_prefill_tokens=200_000))
    again = r.choose(request("2", 8192, talk=1), 10.0)
    pays = r.costs.fetch_pays("remote", 8191)
    assert again.decode != first and (again.uncached < 200) == pays
    r.costs.take([], [FetchSample("remote", 1000, 1e-3 if not pays else 5.0)] * 200, "a")
    assert (r.choose(request("3", 8192, talk=1), 10.0).uncached < 200) != pays


def test_a_session_stays_until_staying_costs_more_than_it_saves() -> None:
    r = router(load("a"), load("b"), load("c"), split=False)
    home = place(r, request("1", 4000, session="s")).decode
    r.finished("1")
    # A little busier than the others: it stays. Far busier: it goes.
    r.report(load(home, at=1.0, queued_prefill_tokens=1500))
    stays = r.choose(request("2", 4000, session="s"), 1.0)
    assert stays.decode == home and stays.why == "session"
    assert r.choose(request("3", 4000), 1.0).decode != home
    r.report(load(home, at=2.0, queued_prefill_tokens=300_000))
    assert r.choose(request("4", 4000, session="s"), 2.0).decode != home


def test_every_gateway_starts_a_session_in_the_same_place() -> None:
    loads = [load(f"w{i}") for i in range(8)]
    gateways = [router(*loads, seed=seed) for seed in range(3)]
    for session in range(20):
        req = request("1", 500, session=f"s{session}")
        assert len({(d := g.choose(req, 0.0)).decode + str(d.prefill) for g in gateways}) == 1


def test_in_a_large_fleet_the_choice_is_still_among_the_least_loaded() -> None:
    loads = [load(f"w{i}", "prefill" if i % 2 else "decode", queued_prefill_tokens=1000 * i, running=i % 50)
             for i in range(200)]  # fmt: skip
    r = router(*loads)
    decision = r.choose(request(), 0.0)
    small, large = decision, router(*loads[:16]).choose(request(), 0.0)
    assert small.ttft <= large.ttft * 1.1
    # 150 at once spread out.
    idle = router(*(load(f"w{i}", "prefill" if i % 2 else "decode") for i in range(200)))
    used = [place(idle, request(str(i))).prefill for i in range(150)]
    assert len(set(used)) > 50


def test_lost_between_choice_and_commit_is_no_error() -> None:
    r = router(load("a"))
    req = request()
    decision = r.choose(req, 0.0)
    r.remove("a")
    r.commit(req, decision, 0.0)
    r.finished(req.id)
    assert r.reserved == 0


def test_sessions_of_a_large_fleet_begin_evenly_and_a_lost_worker_moves_only_its_own() -> None:
    fleet = [load(f"w{i}", "prefill" if i % 2 else "decode") for i in range(60)]
    one, other = router(*fleet), router(*reversed(fleet))

    def begin(made, number: int):
        decision = made.choose(request(f"r{number}", session=f"s{number}"), 0.0)
        assert decision is not None
        return decision.prefill, decision.decode

    first = [begin(one, number) for number in range(300)]
    assert first == [begin(other, number) for number in range(300)]
    assert len({decode for _, decode in first}) > 20
    gone = first[0][1]
    one.remove(gone)
    moved = [
        (old, new) for old, new in zip(first, (begin(one, n) for n in range(300)), strict=True) if old[1] != new[1]
    ]
    assert moved and all(old[1] == gone for old, _ in moved)
