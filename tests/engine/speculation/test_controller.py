"""The controller in worlds whose costs and chances are known: it finds what pays, and never pays for what does not."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from serve_app.engine.drafts import accept
from serve_app.engine.speculation.acceptance import Acceptance
from serve_app.engine.speculation.budget import LossBudget
from serve_app.engine.speculation.controller import FREE, POLICY, SpeculationController
from serve_app.engine.speculation.costs import Average, StepCosts, size_class
from serve_app.engine.speculation.counters import Counters
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.policy import Policy
from serve_app.engine.speculation.proposer import Proposal
from tests.engine.fake import request
from tests.engine.world import FAILS, STANDS, Source, World
from tests.variants import some

# What a step costs: reading the weights, then arithmetic. As measured on CPUs, and a world in which every row costs.
WORLDS = {
    "weights": lambda batch, rows: max(27.0, 20 + 2.4 * rows) + 0.2 * batch,
    "stairs": lambda batch, rows: 27 + 10 * ((rows - 1) // 6),
    "arithmetic": lambda batch, rows: 1.0 + 0.25 * rows,
    "rows": lambda batch, rows: float(rows),
    "cliff": lambda batch, rows: 10.0 + 0.1 * rows + (100 if rows > 2 * batch else 0),
}


def best_speedup(world: str, batch: int, p: float, ask: float = 0.0, limit: int = 16) -> float:
    """Of any fixed number of drafts per request."""
    cost, plain = WORLDS[world], WORLDS[world](batch, batch)
    rates = []
    for k in range(limit + 1):
        tokens = sum(p**j for j in range(k + 1))
        rates.append(tokens / (cost(batch, batch * (1 + k)) + k * ask) * plain)
    return max(rates)


def world(name: str, sources: list[Source], **options) -> World:
    return World(SpeculationController(16), sources, WORLDS[name], **options)


@pytest.mark.parametrize("batch", some([1, 4, 24], 1, 24))
@pytest.mark.parametrize("p", some([0.1, 0.6, 0.95], 0.6))
@pytest.mark.parametrize("name", WORLDS)
def test_never_slower_than_plain_and_nearly_as_fast_as_can_be(name, batch, p):
    found = world(name, [Source("ngram", lambda _: p)], batch=batch)
    assert found.run(300).speedup > (0.95 if name != "cliff" else 0.9)
    assert found.run(300).speedup > 0.98
    best = best_speedup(name, batch, p)
    assert found.speedup > 1 + 0.8 * (best - 1) - 0.07 or name == "cliff"


@pytest.mark.parametrize(("name", "batch"), [("weights", 1), ("arithmetic", 24)])
@pytest.mark.parametrize("p", [0.1, 0.9])
@pytest.mark.parametrize("ask", some([0.02, 0.2, 1.0], 0.2))
def test_a_draft_model_is_asked_where_it_pays(name, ask, p, batch):
    seconds = ask * WORLDS[name](batch, batch)
    found = world(name, [Source("draft", lambda _: p, seconds, limit=8)], batch=batch)
    assert found.run(300).speedup > 0.93
    assert found.run(300).speedup > 0.95
    best = best_speedup(name, batch, p, seconds, 8)
    assert found.speedup > 1 + 0.75 * (best - 1) - 0.06


@pytest.mark.parametrize("seed", range(4))
def test_noise_does_not_mislead_it_for_long(seed):
    rng = random.Random(seed)
    name, batch, p = rng.choice(list(WORLDS)), rng.choice([1, 4, 16]), rng.random()
    found = world(name, [Source("ngram", lambda _: p)], batch=batch, noise=0.3, chance=random.Random(seed))
    found.run(300)
    assert found.run(600).speedup > 0.97 / 1.3


def test_a_request_that_accepts_nothing_is_dropped_and_the_others_go_on():
    found = world("weights", [Source("ngram", lambda index: 0.0 if index == 0 else 0.9)], batch=4)
    found.run(300)
    verified = {0: 0, 1: 0}
    take = found.controller.verify

    def count(proposals):
        kept = take(proposals)
        for index in verified:
            verified[index] += kept[index]
        return kept

    found.controller.verify = count
    found.run(300)
    assert verified[0] < 0.05 * verified[1]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(0.0, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("seconds", some([0.0, 1.0], 0.0))
def test_a_change_of_text_is_noticed(first, then, seconds):
    now = first
    found = world("weights", [Source("s", lambda _: now, seconds, limit=8)], batch=1)
    before = sum(found.run(600).drafted[-200:])
    now = then
    after = sum(found.run(2500).drafted[-200:])
    assert (before > 300) == (first > 0) and (after > 300) == (then > 0)
    if not then:
        assert found.speedup > 0.97


@pytest.mark.slow
def test_a_cost_that_came_and_went_is_tried_again():
    found = world("weights", [Source("ngram", lambda _: 0.9)], batch=1)
    assert found.run(300).speedup > 2
    found.cost = lambda batch, rows: 27.0 * (1 if rows == batch else 20)
    assert found.run(1000).speedup > 0.8
    assert sum(found.drafted[-200:]) < 20
    found.cost = WORLDS["weights"]
    found.run(4000)
    assert found.run(300).speedup > 2


def test_the_free_one_speaks_first_and_the_draft_model_where_it_has_nothing_to_say():
    both = [Source("ngram", lambda _: 0.95, speaks=0.5), Source("draft", lambda _: 0.7, 2.0, limit=4)]
    found = world("weights", both, batch=1)
    found.run(300)
    found.run(600)
    assert 0.3 < found.asked["draft"] / found.asked["ngram"] < 0.7
    alone = world("weights", both[:1], batch=1)
    alone.run(300)
    assert found.speedup > alone.run(600).speedup


def test_a_draft_is_continued_where_that_pays():
    short = Source("ngram", lambda _: 0.98, limit=2)
    found = world("weights", [short, Source("draft", lambda _: 0.9, 0.3, limit=4)], batch=1)
    found.run(200)
    assert found.run(300).asked.get("draft", 0) > 200
    dear = world("weights", [short, Source("draft", lambda _: 0.9, 30.0, limit=4)], batch=1)
    dear.run(400)
    assert dear.run(600).asked.get("draft", 0) < 10


def test_a_better_proposer_is_asked_instead_of_a_worse_one():
    both = [Source("ngram", lambda _: 0.2), Source("draft", lambda _: 0.9, 2.0, limit=4)]
    found = world("weights", both, batch=2)
    found.run(200)
    assert found.run(300).asked["draft"] > 250
    proposers = found.counters.stats()["proposers"]
    assert proposers["ngram"]["proposed_tokens"] < 0.2 * proposers["draft"]["proposed_tokens"]


def test_what_was_proposed_teaches_even_if_it_was_not_verified():
    found = World(SpeculationController(16), [Source("ngram", lambda _: 0.05)], lambda b, r: float(r), batch=8)
    found.run(300)
    assert found.controller.acceptance.mean("ngram", 0) < 0.2
    assert found.counters.stats()["proposed_tokens"] < 300


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("sources", [[Source("ngram", lambda _: 0.1)], [Source("ngram", lambda _: 0.9, speaks=0.0)]])
def test_looking_is_booked_as_well(batch, sources):
    """Where nothing pays, neither drafts nor looking for them may cost more than the allowance."""
    plain = WORLDS["weights"](batch, batch)
    found = world("weights", sources, batch=batch, look=0.1 * plain)
    assert found.run(400).speedup > 0.97
    assert found.run(2000).speedup > 0.985


def test_one_that_does_not_pay_keeps_nobody_from_it():
    free, dear = Source("ngram", lambda _: 0.9, speaks=0.6), Source("draft", lambda _: 0.05, 10.0, limit=4)
    found = world("weights", [free, dear], batch=4)
    for _ in range(5):
        found.controller.budgets.setdefault("draft", LossBudget(POLICY)).looked(0.0, 100.0, 10.0)
    assert found.controller.budgets["draft"].used_up and not found.controller.budgets[FREE].used_up
    found.run(300)
    alone = world("weights", [free], batch=4)
    assert found.run(300).speedup > 1.3 and found.speedup > 0.9 * alone.run(600).speedup


def test_a_hiccup_is_not_held_against_drafts():
    found = world("weights", [Source("ngram", lambda _: 0.9)], batch=1)
    found.run(300)
    found.cost = lambda batch, rows: 27.0 * (50 if rows > batch else 1)
    found.step()
    found.cost = WORLDS["weights"]
    assert found.run(100).speedup > 2


def test_always_and_never():
    for controller, wanted in ((VerifyEverything(4), 4), (SpeculationController(0), 0)):
        one = request("x", [1], max_tokens=99)
        proposal = Proposal(one, controller.max_tokens)
        controller.plain_steps(1)
        members, count = controller.ask(Source("s", float, 1.0, limit=4), [proposal])
        for member in members:
            member.extend("s", 0, [7] * count)
        assert controller.verify([proposal]) == [wanted]


def test_statistics_say_what_was_chosen_and_why():
    found = world("weights", [Source("ngram", lambda _: 0.9), Source("draft", lambda _: 0.5, 300.0)], batch=2)
    found.run(400)
    stats = found.counters.stats() | found.controller.stats()
    assert stats["choices"]["pays"] > 300 and stats["choices"]["measuring plain"] >= 2
    assert stats["last"]["batch"] == 2 and stats["last"]["expected_gain"] > 1
    assert stats["acceptance_length"] > 3 and stats["seconds_gained"] > 0
    assert sum(p["accepted_tokens"] for p in stats["proposers"].values()) == stats["accepted_tokens"]
    assert stats["proposers"]["ngram"]["accepted_tokens"] > 0.99 * stats["accepted_tokens"]
    assert set(stats["step_ms"]) == {"2"}


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_draft_is_judged_only_as_far_as_it_was_reached():
    controller, counters = SpeculationController(8), Counters()
    one = request("x", [1], max_tokens=99)

    def learn(new, verified):
        proposal = Proposal(one, 8)
        proposal.extend("a", 0, [1, 2])
        proposal.extend("b", 3, [3, 4])
        controller.learn(proposal, new)
        counters.verified(proposal, accept([1, 2, 3, 4], new), verified)
        stats = counters.stats()["proposers"]
        return {name: (s["proposed_tokens"], s["accepted_tokens"]) for name, s in stats.items()}

    assert learn([1, 9], 4) == {"a": (2, 1), "b": (2, 0)}
    assert controller.acceptance.mean("b", 3) == controller.acceptance.mean("b", 99)
    assert learn([1, 2, 3, 9], 4) == {"a": (4, 3), "b": (4, 1)}
    # Nothing verified, or the last token ended the request: nobody is blamed.
    assert learn([1], 0) == {"a": (4, 3), "b": (4, 1)}
    assert controller.acceptance.mean("b", 3) < controller.acceptance.mean("b", 99)


def test_what_was_replaced_is_still_judged():
    controller = SpeculationController(8)
    proposal = Proposal(request("x", [1], max_tokens=99), 8)
    proposal.extend("worse", 0, [5, 6])
    proposal.clear()
    assert proposal.request.draft == [] and proposal.length == 0
    proposal.extend("better", 0, [1, 2])
    controller.learn(proposal, [1, 2, 3])
    assert controller.acceptance.mean("worse", 0) < 0.7 < controller.acceptance.mean("better", 0)


def test_two_misses_are_enough_to_doubt_a_request_and_time_heals():
    acceptance = Acceptance(POLICY)
    for _ in range(50):
        acceptance.learn("other", "s", 0, 9, 10)
    before = acceptance.chance("x", "s", 0)
    for _ in range(2):
        acceptance.learn("x", "s", 0, 0, 1)
    assert acceptance.chance("x", "s", 0) < before / 1.6 < acceptance.chance("other", "s", 0)
    for _ in range(200):
        acceptance.tick()
    assert acceptance.chance("x", "s", 0) > 0.9 * before
    acceptance.forget("x")
    assert acceptance.chance("x", "s", 0) == acceptance.mean("s", 0)


def test_costs_between_known_points_lie_on_the_line_and_beyond_them_go_on():
    costs = StepCosts()
    assert costs.plain(4) is None
    for rows, seconds in ((4, 12.0), (4, 10.0), (4, 11.0), (12, 18.0)):
        costs.record(4, rows, seconds)
    assert costs.plain(4) == 11.0 and costs.plain(5) is None
    assert costs.seconds(4, np.array([0.0, 4, 8, 16])).tolist() == [11.0, 14.5, 18.0, 25.0]
    costs.record(4, 8, 30.0)
    assert costs.seconds(4, np.array([2.0, 6])).tolist() == [20.5, 24.0]


@pytest.mark.parametrize("hiccup", range(5))
def test_one_hiccup_is_soon_forgotten(hiccup):
    """Whichever sample it is. What a plain step is believed to take decides whether speculation pays."""
    costs = StepCosts()
    for number in range(8):
        costs.record(16, 16, 0.130 if number == hiccup else 0.012)
        if number >= StepCosts.MIN_SAMPLES - 1:
            assert costs.plain(16) <= 0.016
    assert costs.plain(16) < 0.014


def test_what_is_far_below_is_believed_within_a_few_samples():
    average = Average()
    for sample in (0.1, 0.1, 0.1, *[0.012] * 8):
        average.add(sample)
    assert average.value < 0.019
    for sample in [0.1] * 5:
        average.add(sample)
    assert average.value < 0.035


def test_sizes_of_a_class_differ_by_an_eighth_at_most():
    classes = [size_class(n) for n in range(1, 2000)]
    assert classes == sorted(classes) and classes[:16] == list(range(1, 17))
    for key in set(classes):
        members = [n for n, c in enumerate(classes, 1) if c == key]
        assert members[-1] <= members[0] * 1.125 + 1


def test_the_budget_stops_losses_at_a_few_steps():
    budget, lost = LossBudget(POLICY), 0.0
    for _ in range(2000):
        if budget.used_up:
            budget.ran_plain(1.0)
        else:
            budget.looked(worth=1.0, spent=2.0, plain=1.0)
            lost += 1.0
    assert lost < POLICY.debt + 0.02 * 2000 + 2


@pytest.mark.parametrize(
    "without",
    [
        {"debt": math.inf}, {"credit": 0.0}, {"own_budgets": False}, {"refresh": 0}, {"retry": 0}, {"fade": 1.0},
        {"own_weight": math.inf}, {"grades": False}, {"replace_below": math.inf},         {"cost_curve": False},
    ],
    ids=str,
)  # fmt: skip
def test_each_term_can_be_left_out(without):
    sources = [Source("ngram", lambda _: 0.9, speaks=0.5), Source("draft", lambda _: 0.8, 1.0, limit=4)]
    found = World(SpeculationController(16, Policy(**without)), sources, WORLDS["weights"], batch=4)
    found.run(300)
    assert found.run(300).speedup > 1.3


def test_the_world_is_fair():
    """The tests' own tool: with everything verified, the share of tokens that stand is the chance."""
    found = World(VerifyEverything(1), [Source("s", lambda _: 0.6, limit=1)], WORLDS["rows"], batch=8)
    found.run(2000)
    assert abs(found.tokens / (2000 * 8) - 1.6) < 0.02
    assert {STANDS, FAILS} == {0, 1}
