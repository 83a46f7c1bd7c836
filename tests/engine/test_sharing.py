"""Batch requests take what real-time ones leave of an engine: rows, places, blocks and time."""

from __future__ import annotations

import pytest

from serve_app.costs.steps import StepModel, StepSample
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request, Status
from serve_app.engine.sharing import CREDIT_S, ENTITLED_S, NEAR_S, Sharing
from serve_app.engine.step import Step
from serve_app.sampling_params import SamplingParams
from tests.engine.fake import HistoryModel, answer_alone, make_engine, random_prompt, request, take
from tests.engine.test_random_traffic import checked_step
from tests.variants import some

# A step takes 10 ms with prompts and 10 ms with rows that generate; a prompt's token takes 0.1 ms, a row ROW.
ROW = 2e-3


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """An engine whose steps take what the model of costs says."""

    def __init__(self, row: float = ROW, **options) -> None:
        self.clock = Clock()
        self.model = HistoryModel()
        self.engine = make_engine(self.model, **{"num_blocks": 256, "max_num_seqs": 8, **options})
        self.sharing = self.engine.scheduler.sharing = Sharing(self.clock)
        self.sharing.costs = StepModel((10e-3, 1e-4, 0.0, 10e-3, row, 0.0))
        self.answers: dict = {}
        self.requests: dict[str, Request] = {}
        self.seconds = {"realtime": 0.0, "batch": 0.0}

    def add(self, name: str, prompt: list[int], *, batch: bool = False, share: float = 0.05, **sampling) -> Request:
        new = request(name, prompt, **sampling)
        new.share = share if batch else None
        self.requests[name] = new
        self.engine.add(new)
        return new

    def step(self) -> Step:
        scheduler = self.engine.scheduler
        step = scheduler.next()
        scheduler.blocks.check()
        if step.scheduled:
            took = seconds(self.sharing.costs, step.scheduled)
            own = seconds(self.sharing.costs, [s for s in step.scheduled if not s.request.batch])
            self.seconds["realtime"] += own
            self.seconds["batch"] += took - own
            self.clock.now += took
            take(scheduler.commit(step, self.engine.runner.run(step)), self.answers)
        return step

    def finish(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still busy")


def seconds(costs: StepModel, scheduled: list) -> float:
    prompts = [s for s in scheduled if s.start < s.request.prompt_len]
    rows = [s for s in scheduled if s not in prompts]
    taken = sum(costs.chunk_seconds(s.count, s.start) for s in prompts) + costs.p0 * bool(prompts)
    return taken + (costs.decode_seconds(len(rows), sum(s.start for s in rows)) if rows else 0.0)


def names(step: Step) -> list[str]:
    return [s.request.id for s in step.scheduled]


def test_batch_rows_ride_along_where_they_cost_next_to_nothing():
    world = World(row=5e-5)
    for n in range(7):
        world.add(f"b{n}", [2, n], batch=True, max_tokens=50)
    world.step()
    world.add("r", [1], max_tokens=50)
    world.step()
    # 5 % of 10 ms are ten rows of 50 us.
    assert set(names(world.step())) == {"r", *(f"b{n}" for n in range(7))}


def test_batch_rows_pause_and_keep_their_blocks_where_they_would_slow_real_time_rows():
    world = World()
    held = [world.add(f"b{n}", random_prompt(n, 40), batch=True, max_tokens=60) for n in range(4)]
    for _ in range(5):
        world.step()
    assert len(names(world.step())) == 4
    world.add("r", [1], max_tokens=30)
    before = [list(one.blocks) for one in held]
    longest = 0.0
    for _ in range(30):
        step = world.step()
        assert names(step)[0] == "r" and len(names(step)) <= 2
        extra = [s for s in step.scheduled if s.request.batch]
        longest = max(longest, seconds(world.sharing.costs, step.scheduled) - 10e-3)
        assert len(extra) <= 1
    assert longest <= 2 * ROW + 1e-9  # its own row, and one other at a time
    assert [one.blocks[: len(old)] for one, old in zip(held, before, strict=True)] == before
    assert all(one.preemptions == 0 for one in held)
    world.finish()


@pytest.mark.parametrize("share", some([0.05, 0.3], 0.05))
def test_batch_requests_have_their_share_of_the_time_however_busy_it_is(share):
    world = World()
    for n in range(4):
        world.add(f"b{n}", random_prompt(n, 100), batch=True, share=share, max_tokens=10_000)
    for n in range(700):
        if sum(not r.batch for r in world.engine.scheduler.running) < 3:
            world.add(f"r{n}", random_prompt(n, 60), max_tokens=20)
        world.step()
    got = world.seconds["batch"] / sum(world.seconds.values())
    assert 0.85 * share < got < 1.15 * share


def test_prompts_of_batch_requests_come_in_pieces_beside_real_time_rows():
    world = World(row=1e-4, max_batch_tokens=512)
    world.add("r", [1], max_tokens=400)
    world.step()
    long = world.add("b", random_prompt(0, 400), batch=True, max_tokens=2)
    sizes = []
    while world.engine.has_work and "b" not in world.answers:
        sizes += [s.count for s in world.step().scheduled if s.request is long and s.start < long.prompt_len]
    # A block takes 13 ms of the half a millisecond that a step has to spare.
    assert max(sizes) == 32 and sum(sizes) == 400
    assert world.seconds["batch"] / sum(world.seconds.values()) < 0.06


def test_a_real_time_request_gets_the_place_of_a_batch_request_at_once():
    world = World(max_num_seqs=2)
    for n in range(2):
        world.add(f"b{n}", random_prompt(n, 70), batch=True, max_tokens=40)
    for _ in range(10):
        world.step()
    world.add("r", [1], max_tokens=5)
    step = world.step()
    assert "r" in names(step) and step.yielded == 1 and step.preempted == 0
    assert [r.id for r in world.engine.scheduler.running] == ["r", "b0"]
    world.finish()
    for n in range(2):
        alone = answer_alone(world.model, random_prompt(n, 70), SamplingParams(temperature=0.0, max_tokens=40))
        assert world.answers[f"b{n}"] == alone


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_k": 5}], ids=["greedy", "seeded"])
def test_blocks_of_batch_requests_are_taken_at_once_and_lose_no_token(sampling):
    world = World(num_blocks=9)
    prompts = [random_prompt(n, 60) for n in range(3)]
    for n in range(2):
        world.add(f"b{n}", prompts[n], batch=True, max_tokens=40, **sampling)
    for _ in range(36):
        world.step()
    big = random_prompt(9, 150)
    world.add("r", big, max_tokens=20)
    step = world.step()
    assert names(step)[0] == "r" and step.yielded >= 1
    last = world.engine.scheduler.waiting[-1]
    assert last.id == "b1" and last.status is Status.WAITING and last.output_len > 0
    world.finish()
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **sampling})
    for n in range(2):
        assert world.answers[f"b{n}"] == answer_alone(world.model, prompts[n], params)
    assert (
        world.answers["r"].tokens
        == answer_alone(world.model, big, SamplingParams(temperature=0.0, max_tokens=20)).tokens
    )


def test_what_a_batch_request_computed_is_found_again_in_the_cache():
    world = World(num_blocks=64, max_num_seqs=1)
    batch = world.add("b", random_prompt(0, 320), batch=True, max_tokens=30)
    for _ in range(5):
        world.step()
    world.add("r", [1], max_tokens=2)
    world.finish()
    assert batch.preemptions == 1
    # Ten blocks of the prompt were not computed again.
    assert world.engine.scheduler.blocks.cached_blocks >= 10
    assert (
        world.answers["b"].tokens
        == answer_alone(world.model, random_prompt(0, 320), SamplingParams(temperature=0.0, max_tokens=30)).tokens
    )


@pytest.mark.slow
def test_real_time_requests_take_every_place_but_not_for_ever():
    world = World(max_num_seqs=2)
    world.add("b", random_prompt(0, 50), batch=True, max_tokens=4)
    at, number = None, 0
    for _ in range(4000):
        for _ in range(3 - len(world.engine.scheduler.waiting)):
            number += 1
            world.add(f"r{number}", [1, number % 30], max_tokens=6)
        world.step()
        if "b" in world.answers and at is None:
            at = world.clock.now
        if at is not None and world.answers["b"].finish_reason:
            break
    # It is owed 5 % of the time, and lets others go first until that is a second.
    assert at is not None and at > ENTITLED_S / 0.06
    assert world.answers["b"].finish_reason == "length"


@pytest.mark.slow
def test_a_step_of_batch_rows_is_short_while_real_time_requests_come():
    world = World()
    for n in range(8):
        world.add(f"b{n}", random_prompt(n, 20), batch=True, max_tokens=400)
    world.step()
    assert len(names(world.step())) == 8  # nobody is near
    world.add("r", [1], max_tokens=60)
    while "r" not in world.answers or not world.answers["r"].finish_reason:
        world.step()
    # A step of its own took 12 ms, and so may a step of batch rows: the oldest of them go on.
    alone = world.step()
    assert not alone.beside and seconds(world.sharing.costs, alone.scheduled) <= 12.5e-3 and "b0" in names(alone)
    world.clock.now += NEAR_S
    assert len(names(world.step())) == 7 + (len(world.engine.scheduler.running) == 8)
    world.finish()


def test_time_that_nobody_else_wants_is_part_of_the_share():
    """A step of real-time rows is not stretched while batch requests have had more than that between such steps."""
    world = World(row=1e-4)
    world.add("b", random_prompt(1, 20), batch=True, max_tokens=4000)
    world.add("r0", [1], max_tokens=40)
    beside = [step for _ in range(30) if (step := world.step()).beside]
    assert any("b" in names(step) for step in beside)  # it has had nothing yet
    while "r0" not in world.answers or not world.answers["r0"].finish_reason:
        world.step()
    for _ in range(20):
        assert names(world.step()) == ["b"]
    credit, began = -world.sharing.owed, world.clock.now
    assert 0.15 < credit <= CREDIT_S
    world.add("r1", [1], max_tokens=2000)
    while "b" not in names(step := world.step()):
        assert step.beside and names(step) == ["r1"]
    # 5 % of the time has made up for it.
    assert 0.8 * credit / 0.053 < world.clock.now - began < 1.2 * credit / 0.052
    # And however long the engine was its own, it goes without no longer than the most that is counted.
    world.engine.abort("r1")
    for _ in range(200):
        world.step()
    assert -CREDIT_S <= world.sharing.owed < -0.9 * CREDIT_S
    world.engine.abort("b")


def test_without_batch_requests_nothing_is_predicted(monkeypatch):
    def never(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(Sharing, "room", never)
    monkeypatch.setattr(Sharing, "learn", never)
    engine = make_engine(HistoryModel())
    for n in range(3):
        engine.add(request(str(n), [n], max_tokens=5))
    while engine.has_work:
        checked_step(engine)
    engine.add(request("again", [1], max_tokens=5))
    engine.step()


def test_costs_are_learned_from_steps_with_batch_requests():
    sharing = Sharing(lambda: 0.0)
    for n in range(400):
        rows = 1 + n % 9
        sharing.learn(StepSample(0, 0, rows, rows * 100, 4e-3 + rows * 5e-5 + rows * 100 * 1e-8))
    assert sharing.costs.d1 < 1e-4 and sharing.costs.d0 == pytest.approx(4e-3, rel=0.1)


def test_batch_requests_that_begin_alike_compute_it_once():
    """One after another in the queue, they would all begin in the same step, before any block of it is there."""
    world = World(num_blocks=128, max_batch_tokens=64)
    shared = random_prompt(0, 160)
    prompts = {f"b{n}": [*shared, n, n + 1] for n in range(6)} | {"other": random_prompt(1, 40)}
    for name, prompt in prompts.items():
        world.add(name, prompt, batch=True, max_tokens=3)
    first = world.step()
    assert names(first) == ["b0"]
    world.finish()
    computed = sum(len(p) - world.requests[n].cached for n, p in prompts.items())
    assert computed == 162 + 5 * 2 + 40
    for name, prompt in prompts.items():
        assert world.answers[name] == answer_alone(world.model, prompt, SamplingParams(temperature=0.0, max_tokens=3))


def test_drafts_are_for_real_time_requests_while_there_are_any():
    engine: Engine = make_engine(HistoryModel())
    batch = request("b", [1, 2], max_tokens=9)
    batch.share = 0.05
    engine.add(batch)
    checked_step(engine)
    assert engine.scheduler.drafted_for == [batch]
    engine.add(request("r", [3], max_tokens=9))
    assert engine.scheduler.drafted_for == []
    checked_step(engine)
    assert [r.id for r in engine.scheduler.drafted_for] == ["r"]
