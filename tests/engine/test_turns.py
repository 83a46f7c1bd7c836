"""Places are shared among accounts, also those that are taken; by the scheduler's clock, never by the wall's."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serve_app.costs.places import GAP_S, PATIENCE_S, TURN_S, share
from serve_app.engine.blocks import BLOCK_TOKENS
from serve_app.engine.request import Request, Status
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.engine.step import Step
from serve_app.engine.turns import LONGEST_S
from tests.engine.fake import answer_alone, random_prompt
from tests.engine.test_sharing import World as Shared
from tests.variants import some

STEP_S = 0.05


class World(Shared):
    """An engine whose steps take STEP_S; requests have accounts. ``had``: steps that each account was in."""

    def __init__(self, places: int = 8, **options) -> None:
        super().__init__(max_num_seqs=places, **options)
        self.step_s = STEP_S
        self.engine.scheduler.sharing.turns._clock = self.clock
        self.had: Counter[bytes] = Counter()

    @property
    def turns(self):
        return self.engine.scheduler.sharing.turns

    def ask(self, name: str, account: str, *, weight: float = 1.0, length: int = 40, **sampling) -> Request:
        sampling = {"max_tokens": 10_000, "ignore_eos": True, **sampling}
        new = self.add(name, random_prompt(len(self.requests), length), **sampling)
        new.tenant, new.weight = account.encode(), weight
        return new

    def step(self) -> Step:
        before = self.clock.now
        step = super().step()
        self.clock.now = before + self.step_s
        self.had.update(s.request.tenant for s in step.scheduled)
        return step

    def run(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.step()

    def places(self) -> dict[str, int]:
        return dict(Counter(r.tenant.decode() for r in self.engine.scheduler.running))

    def check_answers(self) -> None:
        for name, answer in self.answers.items():
            alone = answer_alone(self.model, self.requests[name].tokens[: self.requests[name].prompt_len],
                                 self.requests[name].sampling)  # fmt: skip
            assert answer.tokens == alone.tokens[: len(answer.tokens)], name


def test_one_account_alone_has_all_places_and_nobody_makes_way():
    world = World()
    for n in range(12):
        world.ask(f"a{n}", "a")
    world.run(2 * TURN_S)
    assert world.places() == {"a": 8} and world.turns.given == 0
    assert sum(r.preemptions for r in world.requests.values()) == 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafts", [False, True])
def test_who_asks_while_another_holds_every_place_has_one_in_a_moment(sampling, drafts):
    world = World(places=4)
    if drafts:
        world.engine.speculation = Speculation(NgramProposer(), SpeculationController(4))
    for n in range(4):
        world.ask(f"a{n}", "a", max_tokens=90, **sampling)
    world.run(1.5)
    asked = world.clock.now
    world.ask("b", "b", max_tokens=20, **sampling)
    while "b" not in world.answers:
        world.step()
    assert PATIENCE_S <= world.clock.now - asked <= PATIENCE_S + 3 * STEP_S
    [paused] = [r for r in world.requests.values() if r.preemptions]
    assert (paused.tenant, paused.status, world.turns.given) == (b"a", Status.WAITING, 1)
    computed = []
    while world.engine.has_work:
        computed += [s.count for s in world.step().scheduled if s.request is paused]
    # It went on from what it had computed, all but the part of a block.
    assert max(computed) <= BLOCK_TOKENS + (5 if drafts else 0)
    assert {len(answer.tokens) for answer in world.answers.values()} == {20, 90}
    world.check_answers()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((3.0, 3), (1.0, 2), (1 / 3, 1))],
)
def test_accounts_that_want_all_come_to_have_their_shares(weight, expected):
    world = World(places=4)
    for n in range(4):
        world.ask(f"a{n}", "a")
    world.run(1.0)
    for n in range(4):
        world.ask(f"b{n}", "b", weight=weight)
    world.run(PATIENCE_S + expected * (GAP_S + STEP_S))
    assert world.places() == {"a": 4 - expected, "b": expected} and world.turns.given == expected
    # And stay there, while those that have made way have their turns.
    before = {r.id: r.output_len for r in world.requests.values()}
    world.step_s = 0.25
    for _ in range(5 * round(TURN_S)):
        world.run(1.0)
        assert world.places() == {"a": 4 - expected, "b": expected}
    assert all(r.output_len > before[r.id] for r in world.requests.values() if r.tenant == b"a")
    world.check_answers()


def test_a_place_is_given_back_when_it_is_free_and_never_below_a_share():
    """An account with less than its share gives none, however many others come."""
    world = World(num_blocks=600)
    for n in range(6):
        world.ask(f"a{n}", "a")
    for n in range(2):
        world.ask(f"b{n}", "b")
    world.run(0.2)
    for n in range(4):
        world.ask(f"c{n}", "c", max_tokens=100)
    world.run(PATIENCE_S + 4 * (GAP_S + STEP_S))
    assert world.places() == {"a": 3, "b": 2, "c": 3}
    assert all(r.preemptions == 0 for r in world.requests.values() if r.tenant == b"b")
    while any(r.status is not Status.FINISHED for r in world.requests.values() if r.tenant == b"c"):
        world.step()
    world.run(2 * STEP_S)
    assert world.places() == {"a": 6, "b": 2}


def test_more_accounts_than_places_have_turns():
    world = World(places=4, num_blocks=600)
    names = [f"account{n}" for n in range(7)]
    for name in names:
        world.ask(name, name)
    world.step_s = 0.25
    longest, last = 0.0, dict.fromkeys(names, 0.0)
    while world.clock.now < 8 * TURN_S:
        for item in world.step().scheduled:
            last[item.request.id] = world.clock.now
        longest = max(longest, *(world.clock.now - seen for seen in last.values()))
    assert longest < 3 * TURN_S
    assert world.turns.given <= 3 * 8 and len(world.answers) == 7
    outputs = [r.output_len for r in world.requests.values()]
    assert min(outputs) > 0.4 * max(outputs)


@pytest.mark.slow
def test_blocks_are_shared_like_rows():
    """One account's texts fill the memory, though rows are free."""
    world = World(places=16, num_blocks=64)
    for n in range(7):
        world.ask(f"a{n}", "a", length=240, max_tokens=2000)
    world.run(1.0)
    world.ask("b", "b", length=120, max_tokens=150)
    asked = world.clock.now
    while "b" not in world.answers:
        world.step()
        assert world.clock.now - asked < PATIENCE_S + 4 * LONGEST_S
    while world.requests["b"].status is not Status.FINISHED:
        world.step()
        assert world.clock.now - asked < 15.0
    assert world.requests["b"].preemptions <= 1
    world.check_answers()


@pytest.mark.parametrize("blocks", some([10, 24], 24))
def test_nobody_starves_where_memory_is_too_short_for_even_accounts(blocks):
    """Accounts of equal weight whose texts need many times the blocks: each goes on, and none ends late."""
    world = World(places=16, num_blocks=blocks, max_model_len=280)
    wanting = {name: [world.ask(f"{name}{n}", name, length=60, max_tokens=200) for n in range(3)] for name in "abcd"}
    moved, longest, ended = dict.fromkeys(wanting, (0, 0.0)), 0.0, []
    while wanting:
        world.step()
        for name, requests in list(wanting.items()):
            tokens = sum(r.output_len for r in requests)
            if tokens > moved[name][0]:
                moved[name] = tokens, world.clock.now
            longest = max(longest, world.clock.now - moved[name][1])
            if all(r.status is Status.FINISHED for r in requests):
                ended.append(world.clock.now)
                del wanting[name]
    assert sum(r.preemptions for r in world.requests.values()) > 10
    # With room for one text at a time an account waits for those of the others.
    assert longest <= 4 * TURN_S * (2 if blocks == 10 else 1) and min(ended) >= 0.6 * max(ended)
    assert {len(answer.tokens) for answer in world.answers.values()} == {200} and len(world.answers) == 12
    world.check_answers()


@pytest.mark.parametrize("seed", some(range(5), 1))
def test_whoever_is_below_its_share_never_waits_for_long_and_places_are_not_thrashed(seed):
    """Accounts come and go at random."""
    draw = random.Random(seed)
    places = draw.randrange(2, 7)
    world = World(places=places, num_blocks=draw.choice([40, 160]), max_model_len=600)
    scheduler, short = world.engine.scheduler, dict.fromkeys("abc", 0.0)
    for number in range(200):
        if draw.random() < 0.1:
            world.ask(str(number), draw.choice("aaabc"), length=draw.randrange(1, 60),
                      max_tokens=draw.choice([5, 50, 200]))  # fmt: skip
        world.step()
        held = Counter(r.tenant.decode() for r in scheduler.running)
        wanted = held + Counter(r.tenant.decode() for r in scheduler.waiting)
        assert world.turns.given <= world.clock.now / GAP_S + 1
        for account in "abc":
            due = share(places, 1.0, [(wanted[a], 1.0) for a in wanted if a != account])
            below = wanted[account] > held[account] and held[account] + 1 <= due
            short[account] = short[account] + STEP_S if below else 0.0
            # Accounts have turns where places are fewer; and where memory is short, other bounds hold.
            if scheduler.blocks.num_blocks > 100:
                wait = 2 * (PATIENCE_S + LONGEST_S + places * (GAP_S + STEP_S))
                assert short[account] <= (wait if places > 2 else wait + 2 * TURN_S)
    for _ in range(3000):
        if not world.engine.has_work:
            break
        world.step()
    assert not world.engine.has_work and scheduler.blocks.used_blocks == 0
    world.check_answers()


def test_shares():
    assert share(64, 1.0, [(64, 1.0)]) == 32
    assert share(64, 1.0, [(4, 1.0), (64, 1.0)]) == 30
    assert share(64, 3.0, [(64, 1.0)]) == 48
    assert share(4, 1.0, [(4, 1.0)] * 9) == 1.0
    assert share(8, 1.0, []) == 8


def test_a_prompt_for_another_worker_gets_a_place_and_keeps_it():
    """A worker that prefers prefill may generate too."""
    world = World(places=2)
    for n in range(2):
        world.ask(f"a{n}", "a")
    world.run(1.0)
    new = world.ask("p", "b", length=300)
    new.prefill_only = True
    while new.status is not Status.FINISHED:
        world.step()
        assert world.clock.now < 1.0 + PATIENCE_S + 1.0
    assert new.preemptions == 0
