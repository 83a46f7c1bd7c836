"""Requests stay in the zone of their gateway while it can serve, in small fleets and in large ones."""

from dataclasses import replace

import pytest

from tests.routing.fleets import load, request, router


def test_a_request_stays_in_its_zone_until_waiting_there_costs_more() -> None:
    near, far = load("near", node="n0", zone="eu/a"), load("far", node="n1", zone="eu/b")
    made = router(near, far)
    for number in range(20):
        decision = made.choose(replace(request(f"r{number}"), zone="eu/a"), number * 0.1)
        assert decision is not None and decision.decode == "near"
        made.commit(request(f"r{number}"), decision, number * 0.1)
    # A second of prompts before it: the other zone has it sooner.
    made.report(replace(near, queued_prefill_tokens=60_000, reported_at=2.0))
    decision = made.choose(replace(request("late"), zone="eu/a"), 2.0)
    assert decision is not None and decision.decode == "far"


def test_without_a_zone_all_workers_are_near() -> None:
    made = router(load("a", zone="eu/a"), load("b", zone="us/b", queued_prefill_tokens=1000))
    for zone in ("", "eu/a"):
        decision = made.choose(replace(request(), zone=zone), 0.0)
        assert decision is not None and decision.decode == "a"
    made.report(load("a", zone="", at=1.0, queued_prefill_tokens=4000))
    decision = made.choose(replace(request(), zone="us/b"), 1.0)
    assert decision is not None and decision.decode == "b"


def test_another_region_is_further_than_another_zone() -> None:
    made = router(
        load("busy", zone="eu/a", queued_prefill_tokens=60_000), load("b", zone="eu/b"), load("c", zone="us/a")
    )
    decision = made.choose(replace(request(), zone="eu/a"), 0.0)
    assert decision is not None and decision.decode == "b"


def test_a_hand_over_stays_in_one_zone() -> None:
    fleet = [load(f"p{zone}", "prefill", node=f"n{zone}", zone=f"eu/{zone}") for zone in "ab"]
    fleet += [load(f"d{zone}", "decode", node=f"n{zone}", zone=f"eu/{zone}") for zone in "ab"]
    made = router(*fleet, role_cost=1.0)
    for zone in "ab":
        decision = made.choose(replace(request(f"r{zone}"), zone=f"eu/{zone}"), 0.0)
        assert decision is not None and (decision.prefill, decision.decode) == (f"p{zone}", f"d{zone}")


@pytest.mark.parametrize("zone", ["eu/a", "eu/b"])
def test_of_a_large_fleet_workers_of_the_zone_are_priced(zone: str) -> None:
    # Those of one zone are the least loaded of all, but one of the other serves as well.
    fleet = [load(f"a{i}", zone="eu/a", queued_prefill_tokens=0) for i in range(30)]
    fleet += [load(f"b{i}", zone="eu/b", queued_prefill_tokens=400, running=2) for i in range(30)]
    made = router(*fleet)
    for number in range(60):
        decision = made.choose(replace(request(f"r{number}"), zone=zone), 0.0)
        assert decision is not None and decision.decode[0] == zone[-1]
