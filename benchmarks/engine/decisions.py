"""What questions about one text cost beside reading it.

    python -m benchmarks decisions [MODEL_DIR] [--questions 16] [--rounds 9] [--json]

For states of several lengths, by the processor's time: ``state``, one prompt that is the state alone; ``decisions``,
the state and all questions as an engine worker computes them, in so many ``steps``; ``joined``, one prompt of as
many tokens as these have together, which is the least that they can take. ``ratio`` is decisions to the state,
``least`` what joined is to it, and ``tokens`` is the same in tokens. ``tokenised`` is what the gateway takes for the
prompts. Times are in milliseconds. The engine runs in this process; HTTP and Ray are not measured. A question's
log-probabilities must be those that it gets in a prompt of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks
from serve_app.api.decisions import parse_decide
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.step import StepOutput
from serve_app.models.load import load_causal_lm
from serve_app.text.questions import QuestionPrompts, question_prompts
from serve_app.text.tokenizer import Tokenizer
from serve_app.worker.deciding import ONE

# Of the state, in sentences.
LENGTHS = (20, 80, 160)
SENTENCE = "The function number {} joins iterables one after the other. "
_numbers = itertools.count()


def questions(count: int) -> dict[str, Any]:
    """Three of four are yes or no, the others a choice."""
    choice = {"type": "choice", "instructions": "Which module is it in?", "criteria": ["itertools", "json", "os"]}
    asked = {"type": "noul", "instructions": "Does the text say that it joins iterables?"}
    return {f"q{number}": choice if number % 4 == 3 else asked for number in range(count)}


def run(engine: Engine, requests: list[Request]) -> dict[str, StepOutput]:
    """The last output of each."""
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output
    return found


def request(ids: list[int], shared: int = 0, asked: tuple[int, ...] = ()) -> Request:
    return Request(
        f"r{next(_numbers)}", list(ids), len(ids), ONE, b"root", prefill_only=not asked, shared=shared, asked=asked
    )


def decide(engine: Engine, prompts: QuestionPrompts) -> list[list[float]]:
    """As :func:`serve_app.worker.deciding.decide` has it."""
    shared = prompts.shared.tolist()
    run(engine, [request(shared, len(shared))])
    branches = [
        request(shared + ids.tolist(), len(shared), tuple(token for tokens in labels for token in tokens))
        for ids, labels in zip(prompts.branches, prompts.labels, strict=True)
    ]
    found = run(engine, branches)
    return [_told(found[branch.id]) for branch in branches]


def _told(output: StepOutput) -> list[float]:
    assert output.logprobs
    return [value for _, value in output.logprobs[0].top]


def alone(engine: Engine, prompts: QuestionPrompts, number: int) -> list[float]:
    """A question's numbers from a prompt of its own."""
    engine.scheduler.forget_cache()
    ids = [*prompts.shared.tolist(), *prompts.branches[number].tolist()]
    [output] = run(engine, [request(ids, asked=sum(prompts.labels[number], ()))]).values()
    return _told(output)


def measure(engine: Engine, tokenizer: Tokenizer, sentences: int, count: int, rounds: int, checks: Checks) -> Any:
    state = "".join(map(SENTENCE.format, range(sentences)))
    asked = parse_decide({"state": state, "questions": questions(count)}, "bench").questions
    began = time.thread_time()
    prompts = question_prompts(tokenizer, state, asked)
    tokenised = time.thread_time() - began
    shared = prompts.shared.tolist()
    joined = [*shared, *np.concatenate(prompts.branches).tolist()]
    sides: dict[str, Callable[[], Any]] = {
        "state": lambda: run(engine, [request(shared, asked=(5,))]),
        "decisions": lambda: decide(engine, prompts),
        "joined": lambda: run(engine, [request(joined, asked=(5,))]),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    steps = {}
    for _ in range(rounds):
        for name, side in sides.items():
            engine.scheduler.forget_cache()
            before, began = engine.stats.steps, time.process_time()
            side()
            times[name].append(time.process_time() - began)
            steps[name] = engine.stats.steps - before
    for number in (0, count - 1):
        engine.scheduler.forget_cache()
        gap = np.abs(np.array(decide(engine, prompts)[number]) - alone(engine, prompts, number)).max()
        checks.that(
            f"question {number} behind {len(shared)} tokens", bool(gap < 0.05), f"differs by {gap:.3g} from alone"
        )
    took = {name: statistics.median(values) for name, values in times.items()}
    return {
        "state_tokens": len(shared), "question_tokens": len(joined) - len(shared), "steps": steps["decisions"],
        **{f"{name}_ms": round(1e3 * value, 1) for name, value in took.items()},
        "tokenised_ms": round(1e3 * tokenised, 1),
        "ratio": round(took["decisions"] / took["state"], 2), "least": round(took["joined"] / took["state"], 2),
        "tokens": round(len(joined) / len(shared), 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=CHECKPOINTS / "pico-instruct")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other use the processor too
    model, tokenizer, checks = load_causal_lm(arguments.model), Tokenizer(arguments.model), Checks()
    engine = build_engine(model, EngineLimits(max_num_seqs=64, max_model_len=4096, max_batch_tokens=4096))
    found = [measure(engine, tokenizer, n, arguments.questions, arguments.rounds, checks) for n in LENGTHS]
    checks.require()
    if arguments.json:
        print(json.dumps(found))
        return 0
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
