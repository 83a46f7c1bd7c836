"""Roles follow the load, calmly, and needs follow demand."""

import math
import random

import pytest
from pytest import approx

from serve_app.costs.steps import StepSample
from serve_app.routing.costs import CPU_PRIORS, CostModel
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


def known(**slow: float) -> CostModel:
    """A cost model that has seen workers of these names, so many times as slow as each other."""
    costs, truth = CostModel(), CostModel()
    for _ in range(400):
        for name, factor in slow.items():
            prompts, streams = truth.prefill_seconds(4096), truth.decode_seconds(20, 40_000)
            steps = [StepSample(4096, 0, 0, 0, factor * prompts), StepSample(0, 0, 20, 40_000, factor * streams)]
            costs.observe(steps, name)
    return costs


def settled(p: Planner, loads, demand: Demand) -> set[str]:
    """Who prefers prompts when nothing moves any more."""
    for second in range(0, 400, 11):
        apply(loads, p.plan(loads, demand, float(second)))
    return {one.worker for one in loads if one.role == "prefill"}


SPEEDS = {f"f{i}": 1.0 for i in range(4)} | {f"s{i}": 2.5 for i in range(4)}


def test_fast_workers_take_the_prompts_where_that_gains_most_and_roles_stay() -> None:
    p = Planner(known(**SPEEDS))
    # Streams need the memory of all alike, so that their speed is worth most with prompts.
    loads = [
        load(name, "prefill" if name[0] == "s" else "decode", kv_blocks_total=2000, kv_blocks_used=900)
        for name in SPEEDS
    ]
    found = settled(p, loads, Demand(prefill=3.2, tokens=3000.0, context=3000.0))
    assert found >= {"f0", "f1", "f2", "f3"}
    # It stays so: what is measured moves a little, roles do not.
    assert p.plan(loads, Demand(3.0, 3200.0, 3000.0), 1000.0).moved == []


def test_workers_with_memory_take_the_streams() -> None:
    loads = [load(f"s{i}", "decode", kv_blocks_total=2000, kv_blocks_used=1900) for i in range(4)]
    loads += [load(f"l{i}", "prefill", kv_blocks_total=20_000, kv_blocks_used=1900) for i in range(4)]
    found = settled(planner(), loads, Demand(prefill=3.0, tokens=4000.0, context=4000.0))
    assert sum(name[0] == "l" for name in found) < sum(name[0] == "s" for name in found)


def test_few_places_that_give_tokens_quickly_need_no_more_workers() -> None:
    # 6 ms a step, four places: one client has 150 tokens a second of the 600 that one worker can give.
    one = [load("w", max_seqs=4)]
    needed = planner().needs(one, Demand(prefill=0.02, tokens=150.0, context=60.0))
    assert sum(needed.values()) < 0.5
    # As many tokens as the places can give, and as many again.
    assert planner().needs(one, Demand(prefill=0.02, tokens=1200.0, context=60.0))["decode"] > 2.0


def test_slow_workers_are_needed_in_greater_number() -> None:
    demand = Demand(prefill=3.0, tokens=9000.0, context=2000.0)
    even = planner().needs([load(f"w{i}", max_seqs=2000) for i in range(4)], demand)
    mixed = Planner(known(f0=1.0, s0=4.0))
    slow, fast = (mixed.needs([load(name, max_seqs=2000)], demand) for name in ("s0", "f0"))
    for stage in ("prefill", "decode"):
        assert slow[stage] > 3 * fast[stage] and fast[stage] < 1.1 * even[stage] < slow[stage]


def test_hand_overs_over_slow_links_need_more_workers_for_streams_and_no_new_ones() -> None:
    def demand(prompts: float) -> Demand:
        return Demand(prefill=4.0, tokens=500.0, context=2000.0, prompts=prompts)

    few, many = fleet(6, 2), fleet(6, 2)
    assert len(settled(planner(), few, demand(10_000.0))) > len(settled(planner(), many, demand(400_000.0)))
    assert planner().needs(few, demand(10_000.0)) == planner().needs(few, demand(400_000.0))


def test_roles_end_where_links_are_what_is_short_and_come_back() -> None:
    def demand(prompts: float, prefill: float = 4.0) -> Demand:
        return Demand(prefill, tokens=500.0, context=2000.0, prompts=prompts)

    p, loads, now = planner(), fleet(4, 4), 0.0

    def plan(wanted: Demand) -> set[str]:
        nonlocal now
        for _ in range(60):
            now += 1.0
            apply(loads, p.plan(loads, wanted, now))
        return {one.role for one in loads}

    assert plan(demand(20_000.0)) == {"prefill", "decode"}
    assert plan(demand(1_500_000.0)) == {"mixed"}
    # Streams would stand still too often beside so many prompts.
    assert plan(demand(1_500_000.0, prefill=7.5)) == {"prefill", "decode"}
    assert plan(demand(1_500_000.0)) == {"mixed"}
    assert plan(demand(20_000.0)) == {"prefill", "decode"}


def test_roles_that_ended_are_tried_again_since_nobody_measures_links_without_them() -> None:
    p, loads, seen = planner(), fleet(4, 4), []
    for second in range(700):
        apply(loads, p.plan(loads, Demand(4.0, 500.0, 2000.0, prompts=1_500_000.0), float(second)))
        seen.append({one.role for one in loads} != {"mixed"})
    assert not any(seen[20:290]) and any(seen[300:330]) and not any(seen[330:590])


def test_a_fleet_of_a_thousand_is_planned_in_no_time_and_moves_by_an_eighth() -> None:
    loads = fleet(500, 500)
    plan = planner().plan(loads, HEAVY_DECODE * 100, 0.0)
    assert len(plan.moved) == 125


def noisy(plans: int, seed: int, noise: float, ranks: dict[str, str]) -> int:
    """Moves among equal workers that measure what their roles have them compute, now and then what the others have,
    beside other processes that hold them up.
    """
    draw, costs = random.Random(seed), CostModel(CPU_PRIORS)
    p, loads, held_up = Planner(costs), [load(name, role) for name, role in ranks.items()], dict.fromkeys(ranks, 1.0)
    moves = 0
    for second in range(plans):
        for one in loads:
            held_up[one.worker] = held_up[one.worker] ** 0.95 * math.exp(0.1 * draw.gauss(0, noise))
            own = one.role == "prefill"
            steps = []
            for _ in range(10):
                seqs, tokens = (0, draw.choice([30, 120, 512])) if own else (draw.choice([1, 4, 8]), 0)
                if draw.random() < 0.1:
                    seqs, tokens = (1, 0) if own else (seqs, draw.choice([1, 40, 80]))
                # A step costs something whatever it computes, which the formula has twice.
                seconds = 0.0025 + 6e-5 * tokens + 3e-4 * seqs
                seconds *= held_up[one.worker] * math.exp(draw.gauss(0, noise)) * draw.choice([1.0] * 20 + [5.0])
                steps.append(StepSample(tokens, 0, seqs, 300 * seqs, seconds))
            costs.take(steps, [], one.worker)
            one.queued_prefill_tokens, one.running = draw.choice([0, 500]), draw.choice([0, 1, 4])
        demand = Demand(draw.uniform(0.1, 3.0), draw.uniform(50, 3000), 500.0, 4000.0)
        plan = p.plan(loads, demand, float(second), waiting_tokens=draw.choice([0, 0, 20_000]))
        moves += len(plan.moved)
        apply(loads, plan)
    return moves


@pytest.mark.slow
def test_two_equal_workers_never_change_places_however_noisy_their_speeds() -> None:
    for seed in range(4):
        assert noisy(300, seed, 0.3, {"p": "prefill", "d": "decode"}) == 0
    # A worker that has just come has measured nothing, and is no faster for it.
    costs = known(p=1.0)
    loads = [load("p", "prefill"), load("d", "decode")]
    assert costs.slowness("d") == 1.0
    assert all(Planner(costs).plan(loads, HEAVY_PREFILL, float(at)).moved == [] for at in range(60))


def test_links_between_nodes_count_where_workers_have_no_neighbours() -> None:
    demand = Demand(1.0, 4000.0, 1000.0, prompts=40_000.0)
    near = [load(f"w{i}", node="a") for i in range(4)]
    far = [load(f"w{i}", node=f"n{i}") for i in range(4)]
    slow = [1.0] * 4

    def decode(loads) -> float:
        return planner()._shares(loads, slow, demand, 0, links=True)[0].decode

    node, remote = (CostModel().transfer_seconds(tier, 1) for tier in ("node", "remote"))
    assert decode(far) == approx(decode(near) * node / remote)  # the share of it that one worker could take
