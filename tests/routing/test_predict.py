"""What would become of a request, told without it; and what was told of caches, checked by what then happens."""

from __future__ import annotations

from serve_app.routing.dispatch import Dispatch, DispatchConfig
from serve_app.routing.types import RouteRequest
from tests.routing.world import PLACES, ROUTER, report_of, request

CHUNK = 256


def dispatch(places: int = 4, **more) -> Dispatch:
    made = Dispatch(DispatchConfig(priors=PLACES, router=ROUTER, **more))
    if places:
        made.report("p0", report_of("w0", places, 0.0), 0.0)
    return made


def long(name: str, chunks: int = 4, of: str = "a") -> RouteRequest:
    keys = [f"{of}{number:07d}".encode().ljust(32, b".") for number in range(chunks)]
    return request(name, prompt=chunks * CHUNK + 10, keys=keys)


def run(made: Dispatch, asked: RouteRequest, cached: int, output: int = 5) -> None:
    made.arrive(asked, 1.0)
    made.started(asked.id, 1.1)
    made.finish(asked.id, 1.2, cached=cached, output=output)


def test_nothing_is_known_while_no_worker_is_up():
    assert dispatch(places=0).predict(long("r"), 0.0) is None


def test_a_prediction_is_what_the_request_then_meets():
    made = dispatch()
    first = made.predict(long("r"), 1.0)
    assert first is not None and first.cached_tokens == 0 and 0 <= first.wait <= first.ttft
    run(made, long("r"), 0)
    # Its prefix lies where it ran now.
    again = made.predict(long("s"), 2.0)
    assert again is not None and again.cached_tokens == 4 * CHUNK
    other = made.predict(long("t", of="b"), 2.0)
    assert other is not None and other.cached_tokens == 0
    arrived = long("s")
    made.arrive(arrived, 2.0)
    assert arrived.expected_cached_tokens == again.cached_tokens


def test_who_only_asks_takes_no_place_and_moves_nobody():
    made = dispatch(places=2)
    for _ in range(50):
        made.predict(long("r"), 1.0)
    assert (
        not len(made)
        and not len(made.queue)
        and not made.counters.refused
        and not made.workers.demand.demand(1.0).prefill
    )
    for name in "abcd":
        made.arrive(request(name, output=50), 1.0)
    waiting, refused = len(made.queue), dict(made.counters.refused)
    full = made.predict(request("e", output=50), 1.0)
    assert full is not None and full.wait > 0.5
    assert (len(made.queue), made.counters.refused) == (waiting, refused)


def test_what_caches_were_expected_to_hold_is_checked():
    made, found = dispatch(), None
    run(made, long("r"), 0)
    run(made, long("s"), 4 * CHUNK)
    found = made.counters.cached_tokens
    assert (found.expected, found.missing, found.unexpected) == (4 * CHUNK, 0, 0)
    # The worker has given some of it up, and holds something of another that nobody here knew of.
    run(made, long("t"), CHUNK)
    run(made, long("u", of="b"), 2 * CHUNK)
    assert (found.expected, found.missing, found.unexpected) == (8 * CHUNK, 3 * CHUNK, 2 * CHUNK)


def test_a_request_that_lost_its_worker_or_never_began_checks_nothing():
    made = dispatch()
    run(made, long("r"), 0)
    made.report("p1", report_of("w1", 4, 1.3), 1.3)
    moved, left = long("s"), long("t")
    made.arrive(moved, 1.4)
    made.move(moved.id, 1.5)
    made.started(moved.id, 1.6)
    made.finish(moved.id, 1.7, cached=0, output=3)
    made.arrive(left, 1.8)
    made.finish(left.id, 1.9)
    assert made.counters.cached_tokens.expected == 0
