"""``bench trace TRACE --live URL``: the same trace, at a reduced scale, through a server's OpenAI endpoint.

A trace has no text, so each block id stands for words drawn from it: equal ids are equal text, and a longer prompt of
the same conversation begins with the shorter one. ``--scale`` shortens prompts and answers, ``--duration`` squeezes the
arrival times; what is left of the trace is its shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.checks import Checks
from benchmarks.trace.measure import quantile
from benchmarks.trace.requests import BLOCK, TraceRequest, read_trace, unlimited_hit_ratio

_WORDS = ("a", "the", "of", "and", "to", "in", "is", "on", "for", "it", "with", "as", "at", "by", "from", "that")


@dataclass(slots=True)
class Outcome:
    """One request against the server; times in seconds."""

    status: int = 0
    ttft: float = 0.0
    gaps: tuple[float, ...] = ()
    prompt: int = 0
    cached: int = 0
    output: int = 0
    ended: bool = False


def prompt_of(request: TraceRequest, scale: float) -> str:
    """Words for the request's blocks, about one token each."""
    words: list[str] = []
    for at, block in enumerate(request.blocks):
        draw = random.Random(block)
        tokens = min(BLOCK, request.prompt - at * BLOCK) * scale
        words += [draw.choice(_WORDS) for _ in range(max(1, round(tokens)))]
    return " ".join(words)


async def ask(client: httpx.AsyncClient, model: str, request: TraceRequest, scale: float) -> Outcome:
    """Streams one completion."""
    body = {
        "model": model,
        "prompt": prompt_of(request, scale),
        "max_tokens": max(1, round(request.output * scale)),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    outcome, times = Outcome(), []
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            outcome.status = answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    outcome.ended = outcome.ended or line == "data: [DONE]"
                    continue
                event = json.loads(line[6:])
                if any(choice.get("text") for choice in event.get("choices", ())):
                    times.append(time.perf_counter())
                if usage := event.get("usage"):
                    outcome.prompt, outcome.output = usage["prompt_tokens"], usage["completion_tokens"]
                    outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    except httpx.HTTPError:
        outcome.status = outcome.status if outcome.status >= 400 else 599
    if times:
        outcome.ttft = times[0] - began
        outcome.gaps = tuple(b - a for a, b in zip(times, times[1:], strict=False))
    elif outcome.status == 200:
        outcome.ttft = time.perf_counter() - began  # an empty answer: its end was the first that was seen
    return outcome


async def run(arguments: argparse.Namespace, trace: list[TraceRequest]) -> list[Outcome]:
    """Sends every request at its time, whether or not earlier ones have ended."""
    span = max(trace[-1].at - trace[0].at, 1e-9)
    headers = {"Authorization": f"Bearer {arguments.key}"}
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=arguments.live, headers=headers, timeout=600, limits=limits) as client:
        began = time.perf_counter()

        async def one(request: TraceRequest) -> Outcome:
            due = began + (request.at - trace[0].at) / span * arguments.duration
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            return await ask(client, arguments.model, request, arguments.scale)

        return list(await asyncio.gather(*(one(request) for request in trace)))


def summary(outcomes: list[Outcome], trace: list[TraceRequest], targets: tuple[float, float]) -> dict[str, Any]:
    """What the simulation reports, from measured requests; refused and failed ones are infinitely late."""
    good = [o for o in outcomes if o.status == 200]
    failed = len(outcomes) - len(good)
    gaps = [gap for o in good for gap in o.gaps]
    in_time = [o for o in good if o.ttft <= targets[0] and sum(o.gaps) / max(len(o.gaps), 1) <= targets[1]]
    row: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": failed,
        "statuses": {str(s): sum(o.status == s for o in outcomes) for s in sorted({o.status for o in outcomes})},
        "hit_ratio": round(sum(o.cached for o in good) / max(sum(o.prompt for o in good), 1), 4),
        "unlimited_hit_ratio": round(unlimited_hit_ratio(trace), 4),
        "good_share": round(len(in_time) / max(len(outcomes), 1), 4),
    }
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        ttft = quantile([o.ttft for o in good], q, failed)
        row[f"ttft_{name}_ms"] = round(ttft * 1e3, 1) if ttft < float("inf") else None
        row[f"itl_{name}_ms"] = round(quantile(gaps, q) * 1e3, 2) if gaps else None
    return row


def problem(outcome: Outcome) -> str | None:
    """An answer is complete and tells its usage, or it is a refusal."""
    if outcome.status == 200:
        return None if outcome.ended and outcome.output > 0 else "its stream ended before its answer"
    return None if outcome.status == 429 else f"status {outcome.status}"


def replay(arguments: argparse.Namespace) -> int:
    """The command line's ``--live``."""
    trace = read_trace(arguments.trace, limit=arguments.requests)
    outcomes = asyncio.run(run(arguments, trace))
    checks = Checks()
    for outcome in outcomes:
        checks.add("a request", problem(outcome))
    checks.require()
    row = summary(outcomes, trace, (arguments.ttft_target, arguments.itl_target))
    found = {
        "benchmark": "trace",
        "simulated": False,
        "trace": arguments.trace.name,
        "model": arguments.model,
        "scale": arguments.scale,
        "duration_s": arguments.duration,
        "machine": platform.platform(),
        **row,
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>20}  {value}")
    return 0
