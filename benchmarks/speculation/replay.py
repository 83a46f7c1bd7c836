"""Replays recorded texts and costs through the product's own scheduler, proposers and controller, on a simulated clock.

What is real: :class:`~serve_app.engine.scheduler.Scheduler`, :class:`Speculation`, the controller, look-up. What is
recorded (:mod:`benchmarks.speculation.record`): the answers, and how many tokens of a drafter's chain are right at each
position. What is simulated: the clock, by which a step, a drafter and a look-up take what a :class:`Costs` says; and
prompts, which take no time. So a replay gives the same figures on every machine, however busy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.engine.blocks import BlockPool
from serve_app.engine.request import Request
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Draft, Proposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.engine.step import Sampled, Step
from serve_app.sampling_params import SamplingParams

RECORDED = Path(__file__).parent / "recorded.json"
LENGTH = 4096
# What a wrong draft says.
WRONG = -1


@dataclass(slots=True)
class Text:
    """One answer; ``right[drafter][i]``: the tokens of a chain behind its first ``i`` tokens that are right."""

    prompt: list[int]
    answer: list[int]
    right: dict[str, list[int]]


@dataclass(slots=True)
class Costs:
    """Seconds; ``step(batch, rows)``, ``ask(drafter, batch, count)``, ``look(batch)``. A step takes its own time times
    one of ``spread``.
    """

    step: Callable[[int, int], float]
    ask: Callable[[str, int, int], float]
    look: Callable[[int], float]
    spread: list[float]


def load(path: Path = RECORDED) -> tuple[dict[str, list[Text]], dict[str, Costs]]:
    """Texts by kind, and costs: ``recorded``, and three that are assumed for models that are not at hand."""
    raw = json.loads(path.read_text())
    texts = {
        kind: [Text(t["prompt"], t["answer"], {n: [int(d) for d in r] for n, r in t["right"].items()}) for t in of_kind]
        for kind, of_kind in raw["texts"].items()
    }
    spread = raw["costs"]["spread"]
    return texts, {"recorded": recorded_costs(raw["costs"])} | {
        # A large model whose step reads its weights: rows are nearly free up to a point, drafting is cheap.
        "weights": assumed(lambda batch, rows: max(20.0, 14 + 0.15 * rows) + 0.05 * batch, 1.2, spread),
        # A processor without room to spare: each row costs nearly as much as a step for one request.
        "rows": assumed(lambda batch, rows: 2.0 + rows, 0.3, spread),
        # Beyond a number of rows another, far slower kernel runs.
        # A step that does not look for drafts can be run ahead of the one before, so that looking is dear.
        "ahead": replace(assumed(lambda batch, rows: 8.0 + 0.05 * rows, 0.5, spread), look=lambda batch: 0.002),
        "cliff": assumed(lambda batch, rows: 10.0 + 0.1 * rows + (40 if rows > 2 * batch else 0), 0.8, spread),
    }


def assumed(step_ms: Callable[[int, int], float], draft_ms: float, spread: list[float]) -> Costs:
    return Costs(
        lambda batch, rows: step_ms(batch, rows) / 1e3,
        lambda _, batch, count: draft_ms * count * (1 + 0.02 * batch) / 1e3,
        lambda batch: (0.04 + 0.002 * batch) / 1e3,
        spread,
    )


def recorded_costs(raw: dict[str, Any]) -> Costs:
    steps = _Grid(raw["step_ms"])
    asks = {name: _Grid(table) for name, table in raw["ask_ms"].items()}
    looks = [(float(b), ms) for b, ms in raw["looking_ms"].items()]

    def look(batch: int) -> float:
        return float(np.interp(batch, [b for b, _ in looks], [ms for _, ms in looks])) / 1e3

    return Costs(
        lambda batch, rows: steps(batch, rows - batch),
        lambda name, batch, count: asks[name](batch, count),
        look,
        raw["spread"],
    )


class _Grid:
    """Seconds between measured points: along the rows of the two batches beside the one wanted, then between those."""

    def __init__(self, table: dict[str, dict[str, float]]) -> None:
        self._batches = sorted(int(b) for b in table)
        self._curves = {
            int(b): ([float(x) for x in curve], [ms / 1e3 for ms in curve.values()]) for b, curve in table.items()
        }
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, batch: int, x: int) -> float:
        if (batch, x) not in self._known:
            ys = [float(np.interp(x, *self._curves[b])) for b in self._batches]
            self._known[batch, x] = float(np.interp(batch, self._batches, ys))
        return self._known[batch, x]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class LookUp:
    """The product's look-up, which takes the time of a step's looking."""

    clock: Clock
    costs: Costs
    real: NgramProposer = field(default_factory=NgramProposer)
    name: str = "ngram"
    free: bool = True
    continues: bool = True
    limit: int = 16

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        self.clock.now += self.costs.look(len(requests))
        return self.real.propose(requests, count)

    def forget(self, request_id: str) -> None:
        self.real.forget(request_id)


@dataclass(slots=True)
class Recorded:
    """A drafter whose chains are as right as the recorded ones were."""

    name: str
    texts: dict[str, Text]
    clock: Clock
    costs: Costs
    continues: bool
    limit: int = 4
    free: bool = False

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        self.clock.now += self.costs.ask(self.name, len(requests), count)
        drafts = {}
        for request in requests:
            text = self.texts[request.id]
            at = request.output_len + len(request.draft)
            true = text.answer[at : at + count]
            # Behind a wrong draft nothing can be right.
            stands = request.draft == text.answer[request.output_len : at]
            right = min(text.right[self.name][at], len(true)) if stands and true else 0
            drafts[request.id] = Draft(true[:right] + [WRONG] * (count - right))
        return drafts

    def forget(self, request_id: str) -> None:
        pass


@dataclass(slots=True)
class Result:
    """``seconds`` are summed over answers: a step counts once for each answer it works on."""

    seconds: float = 0.0
    steps: int = 0
    stats: dict[str, Any] = field(default_factory=dict)


def replay(
    texts: list[Text], batch: int, costs: Costs, drafters: list[str], controller: SpeculationController | None
) -> Result:
    """Answers all ``texts``, ``batch`` at a time; without a controller by plain decoding."""
    clock, chance, result = Clock(), random.Random(0), Result()
    scheduler = Scheduler(BlockPool(batch * 64), max_num_seqs=batch, max_model_len=LENGTH, max_batch_tokens=LENGTH)
    by_id = {str(i): text for i, text in enumerate(texts)}
    speculation = None
    if controller is not None:
        proposers: list[Proposer] = [LookUp(clock, costs)] if "ngram" in drafters else []
        proposers += [Recorded(n, by_id, clock, costs, n != "eagle3") for n in drafters if n != "ngram"]
        speculation = Speculation(proposers, controller, clock=clock)
    for name, text in by_id.items():
        sampling = SamplingParams(max_tokens=len(text.answer), temperature=0.0, ignore_eos=True)
        scheduler.add(Request(name, list(text.prompt), len(text.prompt), sampling, root=b"replay"))
    while scheduler.has_work:
        started = clock()
        if speculation is not None:
            speculation.before_step(scheduler.running, LENGTH)
        step = scheduler.next()
        clock.now += step_seconds(step, costs) * chance.choice(costs.spread)
        outputs = scheduler.commit(step, [_sampled(by_id, item.request, item.samples) for item in step.scheduled])
        if speculation is not None:
            speculation.after_step(step, started)
            for output in outputs:
                if output.finish_reason is not None:
                    speculation.forget(output.request_id)
        result.seconds += (clock() - started) * len(step.scheduled)
        result.steps += 1
    if controller is not None:
        result.stats = speculation.stats() if speculation is not None else {}
    return result


def step_seconds(step: Step, costs: Costs) -> float:
    """The pass for all sampled rows."""
    counts = [s.samples for s in step.scheduled if s.samples]
    return costs.step(len(counts), sum(counts)) if counts else 0.0


def _sampled(texts: dict[str, Text], request: Request, samples: int) -> Sampled:
    at = request.output_len
    found = texts[request.id].answer[at : at + samples]
    return Sampled(found + [0] * (samples - len(found)))
