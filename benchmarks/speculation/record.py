"""Records what the ablation replays: texts, what drafters say about them, and what steps and drafts take.

    python -m benchmarks record [--out benchmarks/speculation/recorded.json]

The shipped pico models run for real, with one thread. Times are the processor time of the engine's thread; run it on an
idle machine all the same. Of each kind of text (``texts.py``) answers are written by the model (``tools``, ``code``) or
given (``prose``, ``edit``); at each position of each answer, every drafter drafts a chain behind the true text, and the
number of its tokens that are right is kept as one digit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import CHECKPOINTS
from benchmarks.speculation.speculation import GivenRunner
from benchmarks.speculation.texts import Case, Texts
from serve_app.engine.blocks import BlockPool
from serve_app.engine.build import EngineLimits, build_engine, num_blocks
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.runner import Runner
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer
from serve_app.engine.speculation.eagle import EagleProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Draft, Proposal, Proposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.models.heads.eagle import attach_head
from serve_app.models.load import load_causal_lm
from serve_app.sampling_params import SamplingParams

RECORDED = Path(__file__).parent / "recorded.json"
KINDS = ("prose", "code", "tools", "edit")
DRAFTERS = ("draft", "eagle3")
CASES, ANSWER, CHAIN = 16, 256, 8
BATCHES = (1, 2, 4, 8, 16)
# Drafted rows per request at which steps are timed.
EXTRA = (0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
COUNTS = (1, 2, 4, 8)
REPEAT = 40


class Listener(VerifyEverything):
    """Has everybody draft at every step and verifies nothing, so that each draft is one behind the true text."""

    def verify(self, proposals: list[Proposal]) -> list[int]:
        return [0] * len(proposals)


class Noted:
    """A proposer whose drafts are kept by request and position."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.name, self.free, self.continues = proposer.name, False, proposer.continues
        self.limit = CHAIN
        self.said: dict[str, dict[int, list[int]]] = {}

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        drafts = self._proposer.propose(requests, count)
        for request in requests:
            draft = drafts.get(request.id)
            self.said.setdefault(request.id, {})[request.output_len] = draft.tokens if draft else []
        return drafts

    def forget(self, request_id: str) -> None:
        self._proposer.forget(request_id)


class Filler:
    """Proposes ``rows`` tokens in all, wrong ones, so that steps of so many rows can be timed."""

    name, free, limit, continues = "filler", True, 16, False
    rows = 0

    def propose(self, requests: list[Request], count: int) -> dict[str, Draft]:
        each, more = divmod(self.rows, len(requests))
        return {r.id: Draft([1] * (each + (i < more))) for i, r in enumerate(requests)}

    def forget(self, request_id: str) -> None:
        pass


class Recorder:
    def __init__(self) -> None:
        self.target = load_causal_lm(CHECKPOINTS / "pico-instruct")
        self.draft = load_causal_lm(CHECKPOINTS / "pico-draft")
        self.limits = EngineLimits(max_batch_tokens=2048, max_num_seqs=CASES, max_model_len=2048)

    def engine(self, answers: dict[str, list[int]] | None = None) -> Engine:
        made = build_engine(self.target, self.limits)
        engine = Engine(GivenRunner(self.target.forward, made.runner.kv), made.scheduler)
        engine.runner.answers = answers or {}  # type: ignore[attr-defined]
        return engine

    def answers(self, cases: list[Case]) -> list[list[int]]:
        engine = self.engine()
        outputs = run(engine, cases)
        return [case.answer[:ANSWER] if case.answer else outputs[i] for i, case in enumerate(cases)]

    def drafter(self, name: str, answers: list[list[int]]) -> tuple[Engine, Proposer]:
        """An engine that says ``answers``, and a drafter beside it which is not plugged in."""
        # The head's K/V are further layers of the target's cache: a target of its own.
        target = load_causal_lm(CHECKPOINTS / "pico-instruct") if name == "eagle3" else self.target
        head = attach_head(target, CHECKPOINTS / "pico-eagle3") if name == "eagle3" else None
        made = build_engine(target, replace(self.limits, reserved_blocks=CASES))
        engine = Engine(GivenRunner(target.forward, made.runner.kv), made.scheduler)
        engine.runner.answers = {str(i): a for i, a in enumerate(answers)}  # type: ignore[attr-defined]
        if head is None:
            return engine, DraftProposer(self.draft_engine().propose, limit=CHAIN)
        proposer = EagleProposer(head, engine.runner.kv, engine.scheduler.blocks, CASES, limit=CHAIN)
        engine.runner.observer = proposer
        return engine, proposer

    def draft_engine(self) -> DraftEngine:
        blocks = num_blocks(self.limits, self.draft.kv_shape.block_bytes)
        runner = Runner(self.draft.forward, self.draft.kv_shape.allocate(blocks, self.draft.device))
        return DraftEngine(runner, BlockPool(blocks), max_model_len=self.limits.max_model_len)

    def chains(self, cases: list[Case], answers: list[list[int]], name: str) -> list[str]:
        """Right tokens of the chain behind each prefix of each answer, a digit each."""
        engine, proposer = self.drafter(name, answers)
        noted = Noted(proposer)
        engine.speculation = Speculation(noted, Listener(CHAIN), vocab_size=self.target.vocab_size)
        outputs = run(engine, cases)
        assert outputs == {i: a for i, a in enumerate(answers)}
        return [
            "".join(str(right(noted.said[str(i)].get(at, []), answer[at:])) for at in range(len(answer)))
            for i, answer in enumerate(answers)
        ]

    def step_costs(self, cases: list[Case]) -> dict[str, Any]:
        """Milliseconds of a step by batch and extra rows, how much single ones differ from that, and of looking."""
        table: dict[str, dict[str, float]] = {}
        looking: dict[str, float] = {}
        spread: list[float] = []
        for batch in BATCHES:
            engine, filler, taken = (
                self.engine({str(i): [5] * 4096 for i in range(batch)}),
                Filler(),
                Timed(16),
            )
            engine.speculation = Speculation(filler, taken, clock=time.thread_time)
            queue(engine, cases[:batch], 900)
            engine.step()
            extras = sorted({round(e * batch) for e in EXTRA})
            seconds: dict[int, list[float]] = {extra: [] for extra in extras}
            # In turns, since contexts grow; the first turns warm up.
            for turn in range(REPEAT + 5):
                for extra in extras:
                    filler.rows = extra
                    engine.step()
                    if turn >= 5:
                        seconds[extra].append(taken.seconds[-1])
            for extra, of_extra in seconds.items():
                middle = statistics.median(of_extra)
                table.setdefault(str(batch), {})[str(extra)] = round(1e3 * middle, 4)
                spread += [s / middle for s in of_extra]
            ngram = Timed(16)
            engine = self.engine()
            engine.runner.answers = {str(i): list(range(5, 4000)) for i in range(batch)}  # type: ignore[attr-defined]
            engine.speculation = Speculation(NgramProposer(), ngram, clock=time.thread_time)
            queue(engine, cases[:batch], 100)
            while engine.has_work:
                engine.step()
            looking[str(batch)] = round(1e3 * statistics.median(ngram.looking), 4)
        spread.sort()
        return {
            "step_ms": table,
            "looking_ms": looking,
            "spread": [round(spread[int(q * (len(spread) - 1) / 40)], 3) for q in range(41)],
        }

    def ask_costs(self, cases: list[Case], name: str) -> dict[str, Any]:
        """Milliseconds of asking a drafter by batch and count of tokens."""
        table: dict[str, dict[str, float]] = {}
        for batch in BATCHES:
            engine, proposer = self.drafter(name, [])
            queue(engine, cases[:batch], 400)
            engine.step()
            for count in COUNTS:
                seconds = []
                for _ in range(REPEAT):
                    running = engine.scheduler.running
                    started = time.thread_time()
                    proposer.propose(running, count)
                    seconds.append(time.thread_time() - started)
                    engine.step()
                table.setdefault(str(batch), {})[str(count)] = round(1e3 * statistics.median(seconds), 4)
        return table


class Timed(VerifyEverything):
    """Verifies everything and keeps the times of its steps."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.seconds: list[float] = []
        self.looking: list[float] = []

    def record(self, batch: int, rows: int, gained: int, seconds: float, looking: float) -> None:
        super().record(batch, rows, gained, seconds, looking)
        self.seconds.append(seconds)
        self.looking.append(looking)


def queue(engine: Engine, cases: list[Case], tokens: int) -> None:
    for index, case in enumerate(cases):
        wanted = min(tokens, len(case.answer)) if case.answer is not None else tokens
        sampling = SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True)
        engine.add(Request(str(index), list(case.prompt), len(case.prompt), sampling, root=b"record"))


def run(engine: Engine, cases: list[Case]) -> dict[int, list[int]]:
    queue(engine, cases, ANSWER)
    outputs: dict[int, list[int]] = {i: [] for i in range(len(cases))}
    while engine.has_work:
        for output in engine.step():
            outputs[int(output.request_id)] += output.token_ids
    return outputs


def right(draft: list[int], true: list[int]) -> int:
    count = 0
    for drafted, token in zip(draft, true, strict=False):
        if drafted != token:
            break
        count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORDED)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorder, texts = Recorder(), Texts(CHECKPOINTS / "pico-instruct", ANSWER).workloads(real=True)
    found: dict[str, Any] = {"chain": CHAIN, "texts": {}}
    for kind in KINDS:
        cases = texts[kind](CASES)
        answers = recorder.answers(cases)
        chains = {name: recorder.chains(cases, answers, name) for name in DRAFTERS}
        found["texts"][kind] = [
            {"prompt": c.prompt, "answer": a, "right": {name: chains[name][i] for name in DRAFTERS}}
            for i, (c, a) in enumerate(zip(cases, answers, strict=True))
        ]
        for name in DRAFTERS:
            digits = [int(d) for chain in chains[name] for d in chain]
            print(f"{kind:6} {name:7} mean right of {CHAIN}: {statistics.mean(digits):.2f}", flush=True)
    code = texts["code"](CASES)
    found["costs"] = recorder.step_costs(code) | {"ask_ms": {n: recorder.ask_costs(code, n) for n in DRAFTERS}}
    print(json.dumps(found["costs"]))
    options.out.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
