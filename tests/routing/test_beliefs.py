"""What is gone is no longer believed to be there, and the index is as large as what it describes."""

from __future__ import annotations

from hashlib import sha256

from serve_app.routing.beliefs import MOST_KEYS, NODE_GONE_S
from serve_app.routing.router import Router
from serve_app.routing.types import Decision
from tests.routing.fleets import CHUNK, keys, load, request, router

PROMPT = 10 * CHUNK


def told(found: list[bytes]) -> bytes:
    return b"".join(key[:8] for key in found)


def sent(fleet: Router, talk: int, worker: str = "w0") -> None:
    """A request of a conversation is sent to a worker."""
    fleet.learn(request(f"r{talk}", PROMPT, talk), Decision(worker, None, 0.0, 0.0, PROMPT))


def expected(fleet: Router, talk: int) -> int:
    return fleet.expected_cached(request("asked", PROMPT, talk))


def test_what_a_worker_and_its_pool_let_go_is_not_expected_any_more():
    fleet = router(load("w0", pool="p"))
    sent(fleet, 1)
    assert expected(fleet, 1) == PROMPT - 1
    gone = keys(1, PROMPT)[4:]
    fleet.report(load("w0", at=0.1, pool="p", evicted=told(gone)))
    # The pool still has it.
    assert expected(fleet, 1) == PROMPT - 1
    fleet.report(load("w0", at=0.2, pool="p", pool_evicted=told(gone)))
    assert expected(fleet, 1) == 4 * CHUNK
    # Keys that nobody here knows, and a key that comes again.
    fleet.report(load("w0", at=0.3, pool="p", evicted=sha256(b"unknown").digest()[:8] * 3))
    sent(fleet, 1)
    assert expected(fleet, 1) == PROMPT - 1


def test_what_went_on_one_node_stays_on_the_other():
    fleet = router(load("w0", node="n0", pool="p0"), load("w1", node="n1", pool="p1"))
    sent(fleet, 1, "w0")
    gone = told(keys(1, PROMPT))
    fleet.report(load("w1", node="n1", at=0.1, pool="p1", evicted=gone, pool_evicted=gone))
    assert expected(fleet, 1) == PROMPT - 1
    fleet.report(load("w0", node="n0", at=0.1, pool="p0", evicted=gone, pool_evicted=gone))
    assert expected(fleet, 1) == 0


def test_an_emptied_pool_holds_nothing_whoever_hears_of_it_first():
    fleet = router(load("w0", pool="old"), load("w1", pool="old"))
    sent(fleet, 1)
    for worker in ("w0", "w1"):
        fleet.report(load(worker, at=0.1, pool="old", evicted=told(keys(1, PROMPT))))
    assert expected(fleet, 1) == PROMPT - 1
    fleet.report(load("w0", at=0.2, pool="new"))
    assert expected(fleet, 1) == 0
    sent(fleet, 2)
    # One that has yet to hear of it says the old one, whose evictions are nothing to the new one.
    fleet.report(load("w1", at=0.4, pool="old", pool_evicted=told(keys(2, PROMPT))))
    for worker in ("w0", "w1"):
        fleet.report(load(worker, at=0.5, pool="new", evicted=told(keys(2, PROMPT))))
    assert expected(fleet, 2) == PROMPT - 1


def test_a_pool_goes_with_its_node_and_not_with_a_worker():
    fleet = router(load("w0", node="n0", pool="p0"), load("w1", node="n1", pool="p1"))
    sent(fleet, 1, "w0")
    fleet.remove("w0")
    fleet.report(load("w1", node="n1", at=NODE_GONE_S / 2, pool="p1"))
    assert expected(fleet, 1) == PROMPT - 1
    fleet.report(load("w1", node="n1", at=NODE_GONE_S * 1.5, pool="p1"))
    assert expected(fleet, 1) == 0


def test_the_index_is_as_large_as_caches_and_pools():
    fleet = router(load("w0", kv_blocks_total=100))
    small = fleet.locality.capacity
    sent(fleet, 1)
    for number in range(4):
        fleet.report(load(f"w{number}", node=f"n{number}", pool="p", pool_tokens=CHUNK * 50_000))
    assert fleet.locality.capacity >= 200_000 > small
    # What was known is known.
    assert expected(fleet, 1) == PROMPT - 1
    fleet.report(load("huge", node="n9", pool="p", pool_tokens=1 << 50))
    assert fleet.locality.capacity == MOST_KEYS


def test_keys_start_from_the_weights_of_most_workers():
    fleet = router(load("w0", weights=b"old"), load("w1", weights=b"old"))
    assert fleet.beliefs.weights == b"old"
    fleet.report(load("w2", weights=b"new"))
    assert fleet.beliefs.weights == b"old"
    fleet.remove("w0")
    fleet.remove("w1")
    assert fleet.beliefs.weights == b"new"
    fleet.remove("w2")
    assert fleet.beliefs.weights == b"new"
