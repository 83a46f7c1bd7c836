"""The link over which K/V come in is a resource: what is queued there is priced, bounded and forgotten again."""

from __future__ import annotations

import pytest

from serve_app.costs.transfers import FetchSample
from serve_app.routing.admission import Admission
from serve_app.routing.beliefs import pool_holder
from serve_app.routing.fairness import FairQueue
from serve_app.routing.links import WATCH_S, Link
from serve_app.routing.types import Decision
from tests.routing.fleets import keys, load, request, router

SECOND = 25_000  # tokens: 40 us each, from another node, and 13 us from the node's pool


def test_transfers_follow_one_another_and_a_busy_link_is_dear() -> None:
    link = Link()
    assert link.wait(5.0) == 0.0 and link.congestion(5.0) == 0.0
    link.take(2.0, now=5.0)
    link.take(1.0, now=5.0)
    assert link.wait(5.0) == 3.0 and link.wait(20.0) == 0.0
    busy = link.congestion(5.0)
    assert busy == pytest.approx(0.3 / 0.7)
    assert link.congestion(5.0 + 3 * WATCH_S) < 0.05 * busy
    link.queued(0.5, 6.0)
    assert link.wait(6.0) == 0.5


def test_decode_goes_where_the_link_is_free() -> None:
    one = router(load("p", "prefill"), load("d1", "decode"), load("d2", "decode"))
    assert {one.choose(request(str(i), 4000), 1.0).decode for i in range(5)} <= {"d1", "d2"}
    one.report(load("d1", "decode", at=1.0, incoming_tokens=4_000))
    assert one.choose(request("r", 4000), 1.0).decode == "d2"
    one.report(load("d2", "decode", at=1.0, incoming_tokens=60_000))
    assert one.choose(request("r", 4000), 1.0).decode == "d1"


def test_where_all_links_are_full_the_prompt_stays() -> None:
    one = router(load("p", "prefill"), load("d", "decode"))
    assert one.choose(request("r", 4000), 1.0).decode == "d"
    one.report(load("d", "decode", at=1.0, incoming_tokens=200_000))
    decision = one.choose(request("r", 4000), 1.0)
    assert (decision.prefill, decision.moved) == (None, 0.0)


def test_what_is_sent_counts_until_a_report_shows_it_or_it_has_ended() -> None:
    one = router(load("p", "prefill"), load("d", "decode"))
    decisions: list[Decision] = []
    for number in range(3):
        each = request(str(number), 8000)
        decisions.append(one.choose(each, 1.0))
        one.commit(each, decisions[-1], 1.0)
    link, moved = one.fleet.workers["d"].link, [d for d in decisions if d.moved]
    assert len(moved) > 1
    last = max(d.ready for d in moved)
    # A transfer that is ready now has the link to itself, one that is ready with the last of them does not.
    assert link.wait(1.0) == 0.0 and link.wait(1.0, 1.0 + last) == pytest.approx(last)
    # What is computed when the worker reports is in its report, or has arrived.
    one.report(load("d", "decode", at=1.0 + last, running=2))
    assert link.wait(1.0 + last, 9.0) == 0.0
    for number in range(3):
        one.finished(str(number))
    assert not link._coming


def test_what_comes_from_another_node_crosses_that_link_as_well() -> None:
    one = router(load("p", "prefill", node="a"), load("d", "decode", node="b"), load("e", "decode", node="a"))
    # Every other thing equal, decode stays on the node of prefill.
    decision = one.choose(request("r", 8000), 1.0)
    assert decision.decode == "e"
    away = router(load("p", "prefill", node="a"), load("d", "decode", node="b"))
    decision = away.choose(request("r", 8000), 1.0)
    away.commit(request("r", 8000), decision, 1.0)
    if decision.prefill is not None:
        assert away.fleet.inbound("b").wait(1.0, 1.0 + decision.ready) > 0


def test_a_request_waits_in_the_gateway_rather_than_before_a_link() -> None:
    one = router(load("d", "decode"), split=False)
    keyed = request("first", 8000, talk=1)
    one.commit(keyed, one.choose(keyed, 0.0), 0.0)
    one.finished("first")
    admission = Admission(one, FairQueue())
    again = request("again", 8000, talk=1)
    assert isinstance(admission.place(again, 0.5), Decision)
    admission.finished("again")
    one.report(load("d", "decode", at=1.0, incoming_tokens=15_000))
    # 15,000 tokens take the link 0.2 s, and computing anew takes as long: so it is fetched, later.
    found = one.choose(again, 1.0)
    assert found.behind == 0.0 or admission.place(again, 1.0) is None


def test_a_fetch_that_waits_long_is_computed_instead() -> None:
    one = router(load("w", "mixed"))
    keyed = request("first", 8000, talk=1)
    one.commit(keyed, one.choose(keyed, 0.0), 0.0)
    one.finished("first")
    one.locality.remove_holder("w")
    assert one.choose(request("again", 8000, talk=1), 1.0).uncached < 500
    one.report(load("w", "mixed", at=1.0, incoming_tokens=100_000))
    decision = one.choose(request("again", 8000, talk=1), 1.0)
    assert decision.uncached == 8000 and decision.fetch == 0.0


def test_fetches_from_other_nodes_wait_for_each_other() -> None:
    one = router(load("w1", node="b"), load("w2", node="b"), load("w3", node="c"), split=False)
    for _ in range(200):
        one.costs.take([], [FetchSample("remote", 10_000, 0.1)], "w1")
    for talk in range(6):
        one.locality.add(keys(talk, 12_000), pool_holder("a"))
    asked = [request(f"r{talk}", 12_000, talk) for talk in range(3)]
    first = one.choose(asked[0], 1.0)
    assert first.crossing == first.fetch > 0
    one.commit(asked[0], first, 1.0)
    node = one.fleet.workers[first.decode].load.node
    other = next(n for n in ("b", "c") if n != node)
    # The other worker of that node has a free link of its own, and not into the node.
    assert one.fleet.inbound(node).wait(1.0) == pytest.approx(first.fetch)
    assert one.fleet.inbound(other).wait(1.0) == 0.0
    second = one.choose(asked[1], 1.0)
    assert one.fleet.workers[second.decode].load.node == other
    one.finished("r0")
    assert one.fleet.inbound(node).wait(1.0) == 0.0
    # A node without workers is forgotten.
    one.commit(asked[1], second, 1.0)
    for worker in list(one.fleet.workers):
        one.remove(worker)
    assert not one.fleet._on_node
    one.finished("r1")  # nothing of it comes back
    assert not one.fleet._inbound
