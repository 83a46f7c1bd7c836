"""What goes against a role, and prompts beside streams, cost more the tighter the target for first tokens is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.routing.recent import Recent
from serve_app.routing.router import Router
from tests.routing.fleets import load, request, router


def sent_to(one: Router, now: float = 0.0) -> str:
    """Where the next prompt is computed."""
    decision = one.choose(request(prompt=6000), now)
    assert decision is not None
    return decision.prefill or decision.decode


def test_a_prompt_waits_longer_for_its_role_where_the_target_is_tight() -> None:
    fleet = load("p", "prefill", queued_prefill_tokens=4500), load("d", "decode")
    assert sent_to(router(*fleet)) == "d"
    assert sent_to(router(*fleet, ttft=5.0)) == "d"
    assert sent_to(router(*fleet, ttft=1.0)) == "p"
    # But not for ever.
    later = load("p", "prefill", queued_prefill_tokens=15_000), load("d", "decode")
    assert sent_to(router(*later, ttft=1.0)) == "d"


def test_prompts_beside_many_streams_are_spread_over_time() -> None:
    fleet = (
        load("p", "prefill", queued_prefill_tokens=15_000),
        load("d", "decode", running=40, max_seqs=256, kv_blocks_used=12_000),
    )
    one = router(*fleet, ttft=1.0, itl=0.05)
    worker = one.fleet.workers["d"]
    assert worker.gap_s(0.0, 0.0) == worker.step < 0.05
    assert sent_to(one) == "d"
    worker.sent.add(4.0, 0.0)
    # Its streams stand still for four fifths of the time.
    assert worker.gap_s(0.0, 0.0) == pytest.approx(5 * worker.step) and worker.gap_s(0.0, 0.5) > 5 * worker.step
    assert sent_to(one) == "p"
    # The same with a target that leaves time, and once it is over.
    loose = router(*fleet, ttft=5.0, itl=0.05)
    loose.fleet.workers["d"].sent.add(4.0, 0.0)
    assert sent_to(loose) == "d"
    for reported in fleet:
        one.report(replace(reported, reported_at=30.1))
    assert sent_to(one, 30.1) == "d"


def test_what_there_has_been_lately() -> None:
    short, long = Recent(10.0, 1.0), Recent(10.0)
    assert short.rate(0.0) == 0.0 and long.rate(0.0, 5.0) == 0.5
    for tick in range(50):
        for one in (short, long):
            one.add(0.3, tick * 0.1)
    # Five seconds of three each: known from the start, or as a part of ten seconds.
    assert short.rate(5.0) == pytest.approx(3.0, rel=0.02) and long.rate(5.0) == pytest.approx(1.2, rel=0.05)
    assert 0.0 < short.rate(45.0) < 0.1
