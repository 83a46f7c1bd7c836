"""Roles follow the load, calmly, and needs follow demand."""

import random

from pytest import approx

from serve_app.routing.costs import CostModel
from serve_app.routing.planner import Demand, DemandMeter, Planner, PlannerConfig
from tests.routing.fleets import load


def fleet(prefill: int, decode: int):
    return [load(f"p{i}", "prefill") for i in range(prefill)] + [load(f"d{i}", "decode") for i in range(decode)]


def planner(**config) -> Planner:
    return Planner(CostModel(), PlannerConfig(**config))


def apply(loads, plan) -> None:
    for one in loads:
        one.role = plan.roles[one.worker]


def count(loads) -> int:
    return sum(one.role == "prefill" for one in loads)


HEAVY_PREFILL = Demand(prefill=4.0, tokens=500.0, context=2000.0)
HEAVY_DECODE = Demand(prefill=0.5, tokens=60_000.0, context=2000.0)


def test_roles_follow_the_load_and_come_back() -> None:
    p, loads = planner(), fleet(4, 4)
    for second in range(0, 100, 1):
        apply(loads, p.plan(loads, HEAVY_PREFILL, float(second)))
    assert count(loads) >= 6
    for second in range(100, 200, 1):
        apply(loads, p.plan(loads, HEAVY_DECODE, float(second)))
    assert count(loads) <= 2


def test_moves_are_a_while_apart_and_one_at_a_time() -> None:
    p, loads = planner(dwell_s=10.0), fleet(1, 7)
    moves = []
    for second in range(60):
        plan = p.plan(loads, HEAVY_PREFILL, float(second))
        moves += [(second, len(plan.moved))] if plan.moved else []
        apply(loads, plan)
    assert moves and all(n == 1 for _, n in moves)
    assert all(b - a >= 10 for (a, _), (b, _) in zip(moves, moves[1:], strict=False))


def test_a_noisy_but_steady_load_moves_nothing_to_and_fro() -> None:
    draw, p, loads = random.Random(2), planner(dwell_s=0.0), fleet(4, 4)
    changes = 0
    for second in range(600):
        noise = draw.uniform(0.92, 1.08)
        plan = p.plan(loads, Demand(2.6 * noise, 30_000.0 / noise, 1500.0), float(second))
        changes += len(plan.moved)
        apply(loads, plan)
    assert changes <= 4


def test_an_idle_fleet_keeps_its_roles() -> None:
    p, loads = planner(), fleet(6, 2)
    for second in range(50):
        assert p.plan(loads, Demand(0.01, 10.0, 500.0), float(second)).moved == []


def test_one_worker_keeps_its_role_and_a_fresh_pool_gets_both() -> None:
    p = planner()
    assert p.plan([load("a")], HEAVY_PREFILL, 0.0).moved == []
    plan = p.plan([load(f"w{i}") for i in range(4)], HEAVY_PREFILL, 1.0)
    assert set(plan.roles.values()) == {"prefill", "decode"}


def test_those_with_the_least_to_finish_move() -> None:
    loads = [load("p0", "prefill"), load("d0", "decode", running=9), load("d1", "decode", running=1),
             load("d2", "decode", running=5)]  # fmt: skip
    plan = planner().plan(loads, HEAVY_PREFILL, 100.0)
    assert plan.moved == ["d1"]


def test_a_backlog_needs_more_workers() -> None:
    calm = Demand(0.5, 100.0, 1000.0)
    alone, behind = planner().needs(fleet(1, 1), calm), planner().needs(fleet(1, 1), calm, waiting_tokens=2_000_000)
    assert behind["prefill"] > alone["prefill"] + 1


def test_the_meter_measures_rates() -> None:
    meter, draw = DemandMeter(tau=20.0), random.Random(1)
    now = 0.0
    while now < 200.0:
        now += draw.expovariate(10.0)
        meter.arrived(now, 0.2, 100.0, 1000.0)
    demand = meter.demand(now)
    assert 1.6 < demand.prefill < 2.4 and 800 < demand.tokens < 1200 and demand.context == approx(1000.0)
    assert meter.demand(now + 200.0).prefill < 0.01
    both = demand * 2
    assert both.prefill == 2 * demand.prefill and both.context == demand.context
