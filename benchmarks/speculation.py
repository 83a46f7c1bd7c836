"""Speculation against plain decoding, alternating, over proposers, batch sizes and kinds of text.

    serve-app bench speculation [TARGET_DIR] [--draft DIR] [--head DIR] [--batch 1,4,16,64] [--rounds 3] [--json]

Without a directory: the shipped pico-instruct and its draft, which answer for themselves in ``tools`` (JSON tool
calls), ``questions`` and ``code``. In ``edit`` (a file and an instruction; the answer is mostly the file), ``table`` (a
log) and ``prose`` (docstrings that the prompt does not contain) the answer is GIVEN: the target computes every row of
every step as ever, and then says the given token. A target with random weights (``bench checkpoint``) only has those,
and ``loop``, its own greedy output, which repeats itself and flatters look-up. Where answers are given the draft model
is SIMULATED likewise: it runs, and what it proposes is right with ``--draft-acceptance``.

Each side answers the same prompts greedily; answers must be the same tokens. ``ratio`` is plain decoding's time over
this side's, both without the prompt's prefill, in the same round; above 1 is faster. ``cpu`` is the same with the
processor's time, which tells on a machine where others are at work as well. ``steps`` are target steps per
token (plain: 1), ``length`` tokens per request and drafted step. The first round is where controllers learn; it is
listed under ``learning`` and not part of the median.
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

from benchmarks.speculation_texts import Case, Texts
from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import EngineLimits, build_engine, num_blocks
from serve_app.engine.draft import DraftEngine
from serve_app.engine.eagle import EagleProposer
from serve_app.engine.engine import Engine
from serve_app.engine.ngram import NgramProposer
from serve_app.engine.recent import RecentProposer
from serve_app.engine.request import Request, SamplingParams
from serve_app.engine.runner import Runner
from serve_app.engine.scheduler import Sampled, Step
from serve_app.engine.speculate import DraftProposer, DraftQuery, Proposer, Speculation, SpeculationController
from serve_app.models.eagle import EagleHead, attach_head
from serve_app.models.load import CausalModel, load_causal_lm

PICO = Path(__file__).parents[1] / "checkpoints"


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

    def __call__(self, queries: list[DraftQuery], count: int) -> dict[str, list[int] | None]:
        answers = self.engine.propose(queries, count)
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

    def answer(self, cases: dict[str, Case], tokens: int, salt: str) -> dict[str, Any]:
        """Runs a batch to its end; seconds and steps count from when every request has its first token."""
        runner = self.engine.runner
        assert isinstance(runner, GivenRunner)
        runner.answers = {name: c.answer for name, c in cases.items() if c.answer is not None}
        if self.draft is not None:
            self.draft.cases = cases
        for name, case in cases.items():
            wanted = min(tokens, len(case.answer)) if case.answer is not None else tokens
            sampling = SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=case.answer is not None)
            self.engine.add(
                Request(f"{salt}/{name}", list(case.prompt), len(case.prompt), sampling, root=salt.encode())
            )
        outputs: dict[str, list[int]] = {name: [] for name in cases}
        seconds, processor, turns, fresh = 0.0, 0.0, 0, 0
        while self.engine.has_work:
            begun = all(outputs.values())
            started, busy = time.perf_counter(), time.process_time()
            produced = self.engine.step()
            if begun:
                seconds += time.perf_counter() - started
                processor += time.process_time() - busy
                turns += len(produced)
                fresh += sum(len(o.token_ids) for o in produced)
            for output in produced:
                outputs[output.request_id.rpartition("/")[2]] += output.token_ids
        return {"seconds": seconds, "cpu": processor, "steps_per_token": turns / max(1, fresh), "outputs": outputs}


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
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        # Other prompts each round, so that nothing is known by heart.
        everything = workload(64)
        cases = {str(i): everything[(number * batch + i) % 64] for i in range(batch)}
        for side in made if number % 2 else reversed(made):
            found = side.answer(cases, options.tokens, f"{batch}-{number}")
            taken[side.name].append(found)
        plain = taken["plain"][-1]["outputs"]
        for name in sides:
            found = taken[name][-1]
            same = sum(found["outputs"][i] == plain[i] for i in cases)
            found["different"] = batch - same
    return {side.name: _summary(side, taken[side.name], taken["plain"]) for side in made if side.name != "plain"}


def _summary(side: Side, runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [p["seconds"] / r["seconds"] for r, p in zip(runs, plain, strict=True)]
    busy = [p["cpu"] / r["cpu"] for r, p in zip(runs, plain, strict=True)]
    assert side.engine.speculation is not None
    stats = side.engine.speculation.controller.stats()
    return {
        "ratio": round(statistics.median(ratios[1:]), 3),
        "rounds": [round(x, 3) for x in ratios[1:]],
        "cpu_ratio": round(statistics.median(busy[1:]), 3),
        "learning": round(ratios[0], 3),
        "steps": round(statistics.median(r["steps_per_token"] for r in runs[1:]), 3),
        "length": round(stats["acceptance_length"], 2),
        "acceptance": round(stats["acceptance_rate"], 3),
        "different": sum(r["different"] for r in runs),
        "proposers": stats["proposers"],
        "choices": stats["choices"],
        "step_ms": stats["step_ms"],
    }


def report(workload: str, batch: int, by_side: dict[str, Any]) -> None:
    for name, s in by_side.items():
        chosen = ", ".join(f"{n} {why}" for why, n in sorted(s["choices"].items(), key=lambda p: -p[1])[:3])
        differ = f"  {s['different']} answers differ" if s["different"] else ""
        print(
            f"{workload:10} batch {batch:>3} {name:12} {s['ratio']:5.2f}x plain (cpu {s['cpu_ratio']:.2f}x, learning"
            f" {s['learning']:.2f}x)  {1 / s['steps']:.2f}x fewer steps  length {s['length']:.2f}"
            f"  accepted {100 * s['acceptance']:.0f} %  [{chosen}]{differ}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    options = parser.parse_args()
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    target = options.target or PICO / "pico-instruct"
    draft = options.draft or (PICO / "pico-draft" if options.target is None else None)
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
    found["least_ratio"] = min(s["ratio"] for s in every)
    found["different"] = sum(s["different"] for s in every)
    print(f"least ratio {found['least_ratio']:.3f}; answers that differ from plain: {found['different']}")
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
