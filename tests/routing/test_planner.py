"""Roles follow the load, calmly; replicas follow where roles are not enough, down to zero and back."""

import random

from pytest import approx

from serve_app.routing.costs import CostModel
from serve_app.routing.planner import Demand, DemandMeter, Planner, PlannerConfig, StageLimits
from tests.routing.fleets import load

LIMITS = {"prefill": StageLimits(0, 8), "decode": StageLimits(0, 8)}


def fleet(prefill: int, decode: int):
    return [load(f"p{i}", "prefill") for i in range(prefill)] + [load(f"d{i}", "decode") for i in range(decode)]


def planner(**config) -> Planner:
    return Planner(CostModel(), PlannerConfig(limits=LIMITS, **config))


def apply(loads, plan) -> None:
    for one in loads:
        one.role = plan.roles[one.worker]


def count(loads) -> int:
    return sum(one.role == "prefill" for one in loads)


HEAVY_PREFILL = Demand(prefill=4.0, tokens=500.0, context=2000.0, requests=5.0)
HEAVY_DECODE = Demand(prefill=0.5, tokens=60_000.0, context=2000.0, requests=50.0)


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
        plan = p.plan(loads, Demand(2.6 * noise, 30_000.0 / noise, 1500.0, 20.0), float(second))
        changes += len(plan.moved)
        apply(loads, plan)
    assert changes <= 4


def test_an_idle_fleet_keeps_its_roles() -> None:
    p, loads = planner(), fleet(6, 2)
    for second in range(50):
        assert p.plan(loads, Demand(0.01, 10.0, 500.0, 0.1), float(second)).moved == []


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


def test_replicas_grow_after_a_while_shrink_much_later_and_reach_zero() -> None:
    p, loads = planner(up_after_s=5.0, down_after_s=60.0, idle_s=100.0), fleet(1, 1)
    wanted = [p.plan(loads, HEAVY_PREFILL, float(s)).replicas["prefill"] for s in range(10)]
    assert wanted[-1] >= 5 and wanted.count(wanted[-1]) <= 10
    light = Demand(0.2, 100.0, 1000.0, 1.0)
    later = [p.plan(loads, light, 10.0 + s).replicas["prefill"] for s in range(80)]
    assert later[40] == wanted[-1] and later[-1] == 1
    nothing = Demand(0.0, 0.0, 0.0, 0.0)
    gone = [p.plan(loads, nothing, 90.0 + s).replicas for s in range(110)]
    assert gone[0] == {"prefill": 1, "decode": 1} and gone[-1] == {"prefill": 0, "decode": 0}
    assert p.plan([], light, 300.0).replicas == {"prefill": 1, "decode": 1}


def test_limits_hold_and_a_backlog_counts() -> None:
    p = Planner(CostModel(), PlannerConfig(limits={"prefill": StageLimits(1, 3), "decode": StageLimits(2, 4)}))
    huge = Demand(100.0, 1e6, 4000.0, 100.0)
    for second in range(20):
        plan = p.plan(fleet(1, 1), huge, float(second))
    assert plan.replicas == {"prefill": 3, "decode": 4}
    calm = Demand(0.5, 100.0, 1000.0, 1.0)
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
    both = demand + demand
    assert both.prefill == 2 * demand.prefill and both.context == approx(1000.0)
