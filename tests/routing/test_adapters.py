"""Requests with adapters go where theirs is in memory, unless waiting there takes longer than loading it elsewhere."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from serve_app.costs.transfers import FetchSample
from serve_app.routing.types import RouteRequest
from tests.routing.fleets import load, request, router

MB = 1 << 20
ONE = b"adapter1"


def asks(adapter: bytes = ONE, name: str = "r", size: int = 50 * MB, **more) -> RouteRequest:
    return request(name, 200, adapter=adapter, adapter_bytes=size, **more)


def test_the_worker_that_has_the_adapter_is_chosen():
    found = router(load("w0"), load("w1", adapters=frozenset([ONE])), load("w2"))
    for _ in range(5):
        decision = found.choose(asks(), 0.0)
        assert decision is not None and (decision.decode, decision.prefill) == ("w1", None)
    # What it costs elsewhere is what was measured there.
    costly = router(load("w0"))
    before = costly.choose(asks(), 0.0)
    costly.report(load("w0", fetches=tuple(FetchSample("adapter", 100 * MB, 2.0) for _ in range(20))))
    after = costly.choose(asks(), 0.0)
    assert before is not None and after is not None and after.ttft > before.ttft + 0.5
    assert abs(costly.choose(request("plain", 200), 0.0).ttft - after.ttft) > 0.5


def test_a_request_takes_its_adapter_along():
    found = router(load("w0"), load("w1"), load("w2"))
    first = found.choose(asks(), 0.0)
    assert first is not None
    found.commit(asks(), first, 0.0)
    for number in range(3):
        again = found.choose(asks(name=f"r{number}"), 0.1)
        assert again is not None and again.decode == first.decode
    # Until the worker's own reports tell better.
    prices = {found.choose(asks(name=f"x{number}"), 60.0).decode for number in range(20)}
    assert prices - {first.decode}


def test_what_is_asked_for_often_spreads():
    found = router(*(load(f"w{n}", queued_prefill_tokens=0) for n in range(4)))
    found.report(load("w0", adapters=frozenset([ONE])))
    chosen: Counter[str] = Counter()
    for number in range(200):
        one = asks(name=f"r{number}")
        decision = found.choose(one, 0.0)
        assert decision is not None
        found.commit(one, decision, 0.0)
        chosen[decision.decode] += 1
    assert set(chosen) == {"w0", "w1", "w2", "w3"} and max(chosen.values()) < 3 * min(chosen.values())


def test_many_adapters_share_the_workers_out():
    """Of forty adapters over four workers, each settles on one of them, and no worker has much more than its part."""
    draw, found = Random(0), router(*(load(f"w{n}") for n in range(4)))
    held: dict[str, set[bytes]] = {f"w{n}": set() for n in range(4)}
    now, misses = 0.0, 0
    for number in range(400):
        now += 0.5
        adapter = b"adapt%03d" % draw.randrange(40)
        one = asks(adapter, name=f"r{number}")
        decision = found.choose(one, now)
        assert decision is not None
        found.commit(one, decision, now)
        misses += adapter not in held[decision.decode]
        held[decision.decode].add(adapter)
        found.finished(one.id)
        for name, adapters in held.items():
            found.report(load(name, at=now, adapters=frozenset(adapters)))
    assert misses == 40 and max(map(len, held.values())) <= 20


@pytest.mark.parametrize("workers", [16, 200])
def test_of_a_large_fleet_too(workers):
    loads = [load(f"w{n}", adapters=frozenset([ONE] if n == 7 else [])) for n in range(workers)]
    found = router(*loads)
    decision = found.choose(asks(size=500 * MB), 0.0)
    assert decision is not None and decision.decode == "w7"
