"""Speculation against plain decoding, alternating, over proposers, batch sizes and kinds of text.

    serve-app bench speculation [TARGET_DIR] [--draft DIR] [--head DIR] [--batch 1,4,16,64] [--rounds 3] [--json]

Without a directory: the shipped pico-instruct and its draft, which answer for themselves in ``tools`` (JSON tool
calls), ``questions`` and ``code``. In ``edit`` (a file and an instruction; the answer is mostly the file), ``table`` (a
log) and ``prose`` (docstrings that the prompt does not contain) the answer is GIVEN: the target computes every row of
every step as ever, and then says the given token. A target with random weights (``bench checkpoint``) only has those,
and ``loop``, its own greedy output, which repeats itself and flatters look-up. Where answers are given the draft model
is SIMULATED likewise: it runs, and what it proposes is right with ``--draft-acceptance``.

Every side answers the same prompts greedily, ``--tokens`` each (the end token does not end an answer); answers must be
the same tokens, or there are no figures.

Sides take turns of a few steps, so that what else the machine does meets all alike. ``ratio`` is
plain decoding's time over this side's, without the prompt's prefill; above 1 is faster. The time is that of the mean
answer: a step counts once for each answer it works on. ``batch`` is the same until the last answer of the batch is
there, which waits for the text that drafts help least; ``cpu`` is ``ratio`` with the processor's time, for machines
where others are at work as well. ``steps`` are target steps per token (plain: 1), ``length`` tokens per request and
drafted step. The first round is where controllers learn; it is listed under ``learning`` and not part of the median.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks
from benchmarks.speculation.texts import Case, Texts
from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import EngineLimits, build_engine, num_blocks
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.controller import SpeculationController
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer, DraftQuery
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Proposer
from serve_app.engine.speculation.recent import RecentProposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.engine.step import Sampled, Step
from serve_app.models.heads.eagle import EagleHead, attach_head
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.sampling_params import SamplingParams

# Steps that a side runs before it is the next one's turn.
TURN = 8


class GivenRunner(Runner):
    """Computes steps as ever; the answers of some requests are laid down."""

    answers: dict[str, list[int]]

    def run(self, step: Step) -> list[Sampled]:
        found = super().run(step)
        for item, sampled in zip(step.scheduled, found, strict=True):
            answer = self.answers.get(item.request.id.rpartition("/")[2])
            if answer is not None:
                begin = item.request.output_len
                wanted = answer[begin : begin + item.samples]
                sampled.token_ids[: len(wanted)] = wanted
        return found


@dataclass(slots=True)
class GivenDraft:
    """A draft model whose proposals, where the answer is given, are right with probability ``acceptance``."""

    engine: DraftEngine
    acceptance: float
    cases: dict[str, Case]
    held: dict[str, int] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, queries: list[DraftQuery], count: int, over: list[str]) -> dict[str, list[int] | None]:
        answers = self.engine.propose(queries, count, over)
        for query in queries:
            case, draft = self.cases[query.id.rpartition("/")[2]], answers[query.id]
            if draft and case.answer is not None:
                begin = query.agreed + len(query.suffix) - len(case.prompt)
                for index, true in enumerate(case.answer[begin : begin + len(draft)]):
                    draft[index] = true if self.chance.random() < self.acceptance else 1
        return answers


@dataclass(slots=True)
class Side:
    name: str
    engine: Engine
    draft: GivenDraft | None = None

    def begin(self, cases: dict[str, Case], tokens: int, salt: str) -> Run:
        """Queues a batch."""
        runner = self.engine.runner
        assert isinstance(runner, GivenRunner)
        runner.answers = {name: c.answer for name, c in cases.items() if c.answer is not None}
        if self.draft is not None:
            self.draft.cases = cases
        for name, case in cases.items():
            wanted = min(tokens, len(case.answer)) if case.answer is not None else tokens
            sampling = SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True)
            self.engine.add(
                Request(f"{salt}/{name}", list(case.prompt), len(case.prompt), sampling, root=salt.encode())
            )
        return Run(self.engine, {name: [] for name in cases})


@dataclass(slots=True)
class Run:
    """One batch on one side. Seconds and steps count from when every request has its first token."""

    engine: Engine
    outputs: dict[str, list[int]]
    # Until the last answer; summed over answers, which is their mean times their number; the same of the processor.
    seconds: float = 0.0
    answers: float = 0.0
    cpu: float = 0.0
    turns: int = 0
    fresh: int = 0

    def steps(self, count: int) -> None:
        """Up to ``count``."""
        for _ in range(count):
            if not self.engine.has_work:
                return
            begun, running = all(self.outputs.values()), len(self.engine.scheduler.running)
            started, busy = time.perf_counter(), time.process_time()
            produced = self.engine.step()
            busy, seconds = time.process_time() - busy, time.perf_counter() - started
            if begun:
                self.seconds += seconds
                self.answers += seconds * running
                self.cpu += busy * running
                self.turns += len(produced)
                self.fresh += sum(len(o.token_ids) for o in produced)
            for output in produced:
                self.outputs[output.request_id.rpartition("/")[2]] += output.token_ids

    @property
    def steps_per_token(self) -> float:
        return self.turns / max(1, self.fresh)


@dataclass(slots=True)
class Bench:
    target: CausalModel
    draft: CausalModel | None
    limits: EngineLimits
    acceptance: float
    tokens: int
    head: EagleHead | None = None

    def side(self, name: str) -> Side:
        """``plain``, or proposers joined by ``+``."""
        spare = -(-self.limits.max_num_seqs // 4) if "eagle3" in name else 0
        engine = build_engine(self.target, replace(self.limits, reserved_blocks=spare))
        engine = Engine(GivenRunner(self.target.forward, engine.runner.kv), engine.scheduler)
        draft = self._draft() if "draft" in name else None
        if name != "plain":
            made: dict[str, Callable[[], Proposer]] = {
                "ngram": NgramProposer,
                "recent": RecentProposer,
                "draft": lambda: DraftProposer(draft, limit=self.tokens),  # type: ignore[arg-type]
                "eagle3": lambda: self._eagle(engine, spare),
            }
            proposers = [made[part]() for part in name.split("+")]
            engine.speculation = Speculation(proposers, SpeculationController(16), vocab_size=self.target.vocab_size)
        return Side(name, engine, draft)

    def _eagle(self, engine: Engine, spare: int) -> EagleProposer:
        assert self.head is not None
        proposer = EagleProposer(self.head, engine.runner.kv, engine.scheduler.blocks, spare, limit=self.tokens)
        engine.runner.observer = proposer
        return proposer

    def _draft(self) -> GivenDraft:
        assert self.draft is not None
        blocks = num_blocks(self.limits, self.draft.kv_shape.block_bytes)
        runner = Runner(self.draft.forward, self.draft.kv_shape.allocate(blocks, self.draft.device))
        return GivenDraft(
            DraftEngine(runner, BlockPool(blocks), max_model_len=self.limits.max_model_len), self.acceptance, {}
        )


def measure(bench: Bench, sides: list[str], workload: Callable[[int], list[Case]], batch: int, options: Any) -> dict:
    """All sides on one workload at one batch size. New engines and controllers: nothing is known beforehand."""
    made = [bench.side(name) for name in sides]
    taken: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        # Other prompts each round, so that nothing is known by heart.
        everything = workload(64)
        cases = {str(i): everything[(number * batch + i) % 64] for i in range(batch)}
        runs = [side.begin(cases, options.tokens, f"{batch}-{number}") for side in made]
        while any(run.engine.has_work for run in runs):
            for run in runs:
                run.steps(TURN)
        for side, run in zip(made, runs, strict=True):
            taken[side.name].append(run)
    checks = Checks()
    for name, runs in taken.items():
        for plain, run in zip(taken["plain"], runs, strict=True):
            for answer, tokens in run.outputs.items():
                checks.equal(f"{name}, batch {batch}, beside plain", tokens, plain.outputs[answer])
    checks.require()
    return {side.name: _summary(side, taken[side.name], taken["plain"]) for side in made if side.name != "plain"}


def _summary(side: Side, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    pairs = list(zip(plain, runs, strict=True))
    ratios = [p.answers / r.answers for p, r in pairs]
    assert side.engine.speculation is not None
    stats = side.engine.speculation.stats()
    return {
        "ratio": round(statistics.median(ratios[1:]), 3),
        "rounds": [round(x, 3) for x in ratios[1:]],
        "cpu_ratio": round(statistics.median(p.cpu / r.cpu for p, r in pairs[1:]), 3),
        "batch_ratio": round(statistics.median(p.seconds / r.seconds for p, r in pairs[1:]), 3),
        "learning": round(ratios[0], 3),
        "steps": round(statistics.median(r.steps_per_token for r in runs[1:]), 3),
        "length": round(stats["acceptance_length"], 2),
        "acceptance": round(stats["acceptance_rate"], 3),
        "proposers": stats["proposers"],
        "choices": stats["choices"],
        "step_ms": stats["step_ms"],
    }


def report(workload: str, batch: int, by_side: dict[str, Any]) -> None:
    for name, s in by_side.items():
        chosen = ", ".join(f"{n} {why}" for why, n in sorted(s["choices"].items(), key=lambda p: -p[1])[:3])
        print(
            f"{workload:10} batch {batch:>3} {name:12} {s['ratio']:6.3f}x plain (cpu {s['cpu_ratio']:.3f}x, batch"
            f" {s['batch_ratio']:.2f}x, learning {s['learning']:.2f}x)  {1 / s['steps']:.2f}x fewer steps"
            f"  length {s['length']:.2f}  accepted {100 * s['acceptance']:.0f} %  [{chosen}]",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, nargs="?", help="model directory (default: the shipped pico-instruct)")
    parser.add_argument("--draft", type=Path, help="draft model directory (default with pico: its own)")
    parser.add_argument(
        "--head", type=Path, help="EAGLE-3 head directory, for the side eagle3 (answers of its own only)"
    )
    parser.add_argument("--draft-acceptance", type=float, default=0.7, help="simulated, for given answers")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--batch", default="1,4,16,64")
    parser.add_argument("--workloads", help="comma-separated (default: all)")
    parser.add_argument("--sides", default="ngram,draft,ngram+draft", help="proposer sets, comma-separated")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=3, help="beside the one for learning")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    target = options.target or CHECKPOINTS / "pico-instruct"
    draft = options.draft or (CHECKPOINTS / "pico-draft" if options.target is None else None)
    batches = [int(b) for b in options.batch.split(",")]
    limits = EngineLimits(max_batch_tokens=2048, max_num_seqs=max(batches), max_model_len=1024)
    bench = Bench(
        load_causal_lm(target, device=options.device),
        load_causal_lm(draft, device=options.device) if draft else None,
        limits,
        options.draft_acceptance,
        options.draft_tokens,
    )
    if options.head is not None:
        bench.head = attach_head(bench.target, options.head)
    sides = ["plain", *(s for s in options.sides.split(",") if draft or "draft" not in s)]
    texts = Texts(target, options.tokens).workloads(real=options.target is None)
    chosen = options.workloads.split(",") if options.workloads else list(texts)
    found: dict[str, Any] = {"target": target.name, "threads": torch.get_num_threads(), "workloads": {}}
    for name in chosen:
        found["workloads"][name] = {}
        for batch in batches:
            by_side = measure(bench, sides, texts[name], batch, options)
            report(name, batch, by_side)
            found["workloads"][name][str(batch)] = by_side
    every = [s for by_batch in found["workloads"].values() for by_side in by_batch.values() for s in by_side.values()]
    for kind in ("ratio", "cpu_ratio"):
        found[f"least_{kind}"] = min(s[kind] for s in every)
        found[f"median_{kind}"] = round(statistics.median(s[kind] for s in every), 3)
    print(
        f"ratio at least {found['least_ratio']:.3f} (cpu {found['least_cpu_ratio']:.3f}), median"
        f" {found['median_ratio']:.3f} (cpu {found['median_cpu_ratio']:.3f}); all answers equal plain ones"
    )
    if options.json:
        print(json.dumps({"benchmark": "speculation", **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
