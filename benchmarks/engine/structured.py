"""What structured output costs, and what it saves.

    python -m benchmarks structured [MODEL_DIR] [--draft DRAFT_DIR] [--rounds 5] [--parts throughput] [--json]

``throughput``: tokens per second at a batch of 16 with and without a schema (JSON lines that can't end), sampled, the
same number of tokens from the same prompts, drafts left out: what masks cost where nothing is forced. Both sides take
turns of a few steps, so that what else the machine does meets both alike; ``cpu_percent`` is the same by the
processor's time, in which masks count although they are computed beside the forward pass. ``first_token``: from a
request with a schema of 10 kB that nobody has seen to its first token, with the gateway's check, the worker's
compilation and the prompt, against the same prompt without a schema. ``calls``: forced tool calls of the pico family,
target steps per token with and without the draft model, look-up and what the grammar forces. ``library``: compilation
and masks alone. The engine runs in this process; HTTP and Ray are not measured. What was said under a schema must obey
it, and forced calls must be the same tokens whatever drafts them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks
from serve_app.api.openai.read import parse_chat
from serve_app.engine.build import EngineLimits, build_engine
from serve_app.engine.constrain import MaskRows, Masks
from serve_app.engine.engine import Engine
from serve_app.engine.request import Request
from serve_app.engine.speculation.draft_engine import DraftEngine
from serve_app.engine.speculation.draft_proposer import DraftProposer
from serve_app.engine.speculation.everything import VerifyEverything
from serve_app.engine.speculation.forced import ForcedProposer
from serve_app.engine.speculation.ngram import NgramProposer
from serve_app.engine.speculation.proposer import Proposer
from serve_app.engine.speculation.speculate import Speculation
from serve_app.grammar.answer import answer_grammar, token_rule
from serve_app.grammar.check import check_grammar
from serve_app.grammar.matcher import Grammars
from serve_app.grammar.rules import grammar, json_rule
from serve_app.grammar.schema import check_schema
from serve_app.models.load import CausalModel, load_causal_lm
from serve_app.sampling_params import SamplingParams
from serve_app.text.prompt import prompt_ids
from serve_app.text.tokenizer import Tokenizer

BATCH, NEW, DRAFTS = 16, 97, 8
# Steps that a side runs before it is the other's turn.
TURN = 8
LIMITS = EngineLimits(max_num_seqs=BATCH, max_model_len=4096)
QUESTIONS = [
    "What is the weather in Paris?",
    "What is the weather in Oslo, in fahrenheit?",
    "Add 17 and 25.",
    "What time is it in Tokyo?",
    "Please add 3 to 99.",
    "How warm is it in Rome today?",
    "What time is it in Lima?",
    "Weather in Berlin please",
]


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("get_weather", city={"type": "string", "maxLength": 24}, unit={"enum": ["celsius", "fahrenheit"]}),
    tool(
        "add",
        a={"type": "integer", "minimum": 0, "maximum": 1000},
        b={"type": "integer", "minimum": 0, "maximum": 1000},
    ),  # fmt: skip
    tool("get_time", city={"type": "string", "maxLength": 24}),
]


def large_schema(seed: int, size: int = 10_000) -> dict[str, Any]:
    """An object of ``size`` bytes of schema with properties of the usual kinds, no two seeds alike."""
    rng = random.Random(seed)
    properties: dict[str, Any] = {}
    schema = {"type": "object", "properties": properties, "required": [], "additionalProperties": False}
    pair = {"name": {"type": "string"}, "score": {"type": "number"}}
    while len(json.dumps(schema)) < size:
        kinds: list[dict[str, Any]] = [
            {"type": "string", "description": "what it is about", "maxLength": 40},
            {"type": "integer", "minimum": 0, "maximum": rng.randrange(10, 99_999)},
            {"type": "array", "maxItems": 5, "items": {"type": "object", "properties": pair, "required": ["name"]}},
            {"enum": [f"value {rng.randrange(10**6)}" for _ in range(6)]},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
        ]
        properties[f"field {rng.randrange(10**6)}"] = kinds[len(properties) % len(kinds)]
        schema["required"] = list(properties)
    return schema


class Bench:
    def __init__(self, folder: Path, draft: Path | None) -> None:
        self.model: CausalModel = load_causal_lm(folder, max_model_len=LIMITS.max_model_len)
        self.draft = None if draft is None else load_causal_lm(draft, max_model_len=LIMITS.max_model_len)
        self.tokenizer = Tokenizer(folder)
        self.grammars = Grammars(folder, self.model.vocab_size, self.model.eos_token_ids)
        self.grammars.matcher(grammar('"a"', {}))

    def engine(self, proposers: list[Proposer] | None = None) -> Engine:
        engine = build_engine(self.model, LIMITS)
        engine.runner.masks = Masks(self.grammars)
        if proposers:
            engine.speculation = Speculation(proposers, VerifyEverything(DRAFTS))
        return engine

    def add(self, engine: Engine, name: str, prompt: list[int], text: str | None, **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "grammar": text, **sampling})
        request = Request(name, prompt, len(prompt), params, b"bench" * 6)
        assert engine.runner.masks is not None
        engine.runner.masks.compile(request)
        engine.add(request)

    def prompt(self, seed: int, length: int = 64) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(300, min(5000, self.model.vocab_size)) for _ in range(length)]


def finish(engine: Engine) -> int:
    """Steps until idle; the tokens generated."""
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens


def throughput(bench: Bench, rounds: int, new: int = NEW) -> dict[str, Any]:
    item = {"type": "object", "properties": {"name": {"type": "string"}, "score": {"type": "number"}},
            "required": ["name", "score"], "additionalProperties": False}  # fmt: skip
    text = grammar(f"line{{{new}}}", {"line": 'item "\\n"', "item": json_rule(item)})
    sides = [(bench.engine(), None), (bench.engine(), text)]
    checks = Checks()

    def once() -> list[tuple[float, float]]:
        """Seconds and the processor's seconds of each side for all tokens but the first ones."""
        for engine, rules in sides:
            engine.scheduler.forget_cache()
            for i in range(BATCH):
                bench.add(
                    engine, str(i), bench.prompt(i), rules, temperature=1.0, seed=i, ignore_eos=True, max_tokens=new
                )
            engine.step()
        taken = [(0.0, 0.0), (0.0, 0.0)]
        answers: list[dict[str, list[int]]] = [{}, {}]
        while any(engine.has_work for engine, _ in sides):
            for index, (engine, _) in enumerate(sides):
                started, busy = time.perf_counter(), time.process_time()
                outputs = [output for _ in range(TURN) for output in engine.step()]
                for output in outputs:
                    answers[index].setdefault(output.request_id, []).extend(output.token_ids)
                seconds, processor = taken[index]
                taken[index] = (seconds + time.perf_counter() - started, processor + time.process_time() - busy)
        for side, said in zip(("free", "schema"), answers, strict=True):
            # The first token of each came before the clock ran.
            checks.equal(f"{side}, tokens", [len(ids) for ids in said.values()], [new - 1] * BATCH)
        for ids in answers[1].values():
            # The first line began with the token before; the last one is cut off.
            for line in bench.tokenizer.decode(ids).split("\n")[1:-1]:
                checks.that("a line under the schema", obeys(line, item), repr(line))
        checks.require()
        return taken

    once()
    pairs = [once() for _ in range(rounds)]
    tokens = BATCH * (new - 1)
    return {
        "batch": BATCH,
        "free_tokens_per_s": round(statistics.median(tokens / free[0] for free, _ in pairs), 1),
        "schema_tokens_per_s": round(statistics.median(tokens / bound[0] for _, bound in pairs), 1),
        "cost_percent": round(100 * (1 - statistics.median(free[0] / bound[0] for free, bound in pairs)), 2),
        "cpu_percent": round(100 * (1 - statistics.median(free[1] / bound[1] for free, bound in pairs)), 2),
    }


def obeys(line: str, schema: dict[str, Any]) -> bool:
    """Whether ``line`` is an object with the schema's properties and of their types."""
    types = {"string": str, "number": (int, float)}
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return found.keys() == schema["properties"].keys() and all(
        isinstance(found[name], types[kind["type"]]) for name, kind in schema["properties"].items()
    )


def first_token(bench: Bench, rounds: int) -> dict[str, Any]:
    engine, checks = bench.engine(), Checks()

    def once(seed: int, schema: dict[str, Any] | None) -> float:
        engine.scheduler.forget_cache()
        prompt = bench.prompt(seed)
        started = time.perf_counter()
        text = None
        if schema is not None:
            check_schema(schema)
            text = grammar(json_rule(schema), {})
            check_grammar(text)
        bench.add(engine, "1", prompt, text, max_tokens=1)
        tokens = finish(engine)
        seconds = time.perf_counter() - started
        checks.equal("tokens of an answer", tokens, 1)
        return seconds

    once(0, None)
    pairs = [(once(seed, None), once(seed, large_schema(seed))) for seed in range(1, 2 * rounds + 1)]
    checks.require()
    more = sorted(1e3 * (bound - free) for free, bound in pairs)
    return {
        "schema_bytes": len(json.dumps(large_schema(1))),
        "free_ms": round(1e3 * statistics.median(free for free, _ in pairs), 2),
        "more_ms": round(statistics.median(more), 2),
        "more_ms_worst": round(more[-1], 2),
    }


def calls(bench: Bench) -> dict[str, Any]:
    """The same forced calls, token for token, in how many steps of the target."""

    def draft() -> list[Proposer]:
        assert bench.draft is not None
        engine = build_engine(bench.draft, LIMITS)
        drafter = DraftEngine(engine.runner, engine.scheduler.blocks, max_model_len=LIMITS.max_model_len)
        return [DraftProposer(drafter.propose, limit=4)]

    sides: dict[str, Callable[[], list[Proposer]]] = {
        "plain": list,
        "forced": lambda: [ForcedProposer()],
        "forced+ngram": lambda: [ForcedProposer(), NgramProposer()],
    }
    if bench.draft is not None:
        sides["draft"] = draft
        sides["forced+ngram+draft"] = lambda: [ForcedProposer(), NgramProposer(), *draft()]
    found: dict[str, Any] = {}
    truth: list[list[int]] | None = None
    checks = Checks()
    for name, make in sides.items():
        engine = bench.engine(make())
        answers, steps, seconds = [], 0, 0.0
        for number, question in enumerate(QUESTIONS):
            body = {"model": "@cf/a/b", "messages": [{"role": "user", "content": question}], "tools": TOOLS,
                    "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
            request = parse_chat(body)
            text = answer_grammar(request, token=token_rule(bench.tokenizer), family="pico")
            prompt = prompt_ids(bench.tokenizer, request).tolist()
            bench.add(engine, str(number), prompt, text, max_tokens=128)
            engine.step()  # the prompt, and the first token
            before, started = engine.stats.steps, time.perf_counter()
            tokens: list[int] = []
            while engine.has_work:
                tokens += [token for output in engine.step() for token in output.token_ids]
            answers.append(tokens)
            steps += engine.stats.steps - before
            seconds += time.perf_counter() - started
        truth = truth or answers
        count = sum(map(len, answers))
        plain = found.get("plain", {})
        found[name] = {
            "tokens": count,
            "target_steps": steps,
            "tokens_per_step": round(count / steps, 2),
            "fewer_steps": round(plain.get("target_steps", steps) / steps, 2),
            "seconds": round(seconds, 3),
        }
        checks.equal(f"forced calls, {name}", answers, truth)
    checks.require()
    return found


def library(bench: Bench) -> dict[str, Any]:
    compile_ms, mask_us = [], []
    for seed in range(100, 105):
        text = grammar(json_rule(large_schema(seed)), {})
        started = time.perf_counter()
        matcher = bench.grammars.matcher(text)
        compile_ms.append(1e3 * (time.perf_counter() - started))
        rng = np.random.default_rng(seed)
        for _ in range(200):
            started = time.perf_counter()
            bits = bench.grammars.fill([MaskRows(matcher, 0, [])], 1)
            mask_us.append(1e6 * (time.perf_counter() - started))
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            matcher.advance([int(rng.choice(allowed))])
            if matcher.ended:
                break
    mask_us.sort()
    return {
        "vocabulary": bench.model.vocab_size,
        "compile_10kB_ms": round(statistics.median(compile_ms), 2),
        "mask_us": round(statistics.median(mask_us), 1),
        "mask_us_p99": round(mask_us[int(0.99 * len(mask_us))], 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks structured", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, default=CHECKPOINTS / "pico-instruct")
    parser.add_argument("--draft", type=Path, help="a draft model's folder; pico's own for pico")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of each answer of `throughput`")
    parser.add_argument("--parts", help="comma-separated: library, first_token, throughput, calls (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    pico = options.model_dir.name == "pico-instruct"
    draft = options.draft or (CHECKPOINTS / "pico-draft" if pico else None)
    bench = Bench(options.model_dir, draft)
    found: dict[str, Any] = {"model": options.model_dir.name}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "library": lambda: library(bench),
        "first_token": lambda: first_token(bench, options.rounds),
        "throughput": lambda: throughput(bench, options.rounds, options.new),
    }
    if bench.tokenizer.chat_template() is not None:
        parts["calls"] = lambda: calls(bench)
    for name in options.parts.split(",") if options.parts else parts:
        found[name] = parts[name]()
        if not options.json:
            print(name, json.dumps(found[name], indent=2))
    if options.json:
        print(json.dumps({"benchmark": "structured", **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
