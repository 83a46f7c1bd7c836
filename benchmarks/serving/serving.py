"""The running server under load: time to first token, inter-token latency and tokens per second by concurrency.

``python -m benchmarks serving [--url URL] [--concurrency 1,8,32] [--json]``. Measures the server that `serve-app serve`
has started with the same SERVE_APP_HOME. Load and server share the machine, so figures are lower bounds. Every stream
must be complete and as long as was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.checks import Checks
from benchmarks.serving.cancellation import end_token
from serve_app.cluster import read_attachment
from serve_app.config import api_key, load_settings

MODEL = "@cf/pico/pico-instruct"


@dataclass(slots=True)
class Timed:
    """One streamed request; times in seconds."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0


async def timed_stream(client: httpx.AsyncClient, prompt: str, max_tokens: int, checks: Checks) -> Timed:
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "stream": True, "raw": True,
        "logit_bias": {end_token(): -100},
    }  # fmt: skip
    found, last, ended = Timed(), time.perf_counter(), False
    async with client.stream("POST", f"/run/{MODEL}", json=body) as answer:
        if answer.status_code != 200:
            checks.add("a stream", f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            return found
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                ended = ended or line == "data: [DONE]"
                continue
            now = time.perf_counter()
            if not found.first:
                found.first = now - last
            else:
                found.gaps.append(now - last)
            last = now
            frame = json.loads(line.removeprefix("data: "))
            if "usage" in frame:
                found.tokens = frame["usage"]["completion_tokens"]
                found.cached = frame["usage"]["prompt_tokens_details"]["cached_tokens"]
    checks.equal("a stream's end and tokens", (ended, found.tokens), (True, max_tokens))
    return found


async def measure(url: str, key: str, concurrency: int, requests: int, label: str, checks: Checks) -> dict[str, float]:
    limits = httpx.Limits(max_connections=concurrency)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
        gate = asyncio.Semaphore(concurrency)

        async def one(number: int) -> Timed:
            async with gate:
                return await timed_stream(client, f"{label} {number}. " + "Some words about Python. " * 20, 64, checks)

        started = time.perf_counter()
        done = await asyncio.gather(*(one(i) for i in range(requests)))
        seconds = time.perf_counter() - started
    checks.require()
    gaps = sorted(g for d in done for g in d.gaps)
    return {
        "concurrency": concurrency,
        "requests": requests,
        "tokens_per_s": sum(d.tokens for d in done) / seconds,
        "ttft_p50_ms": 1000 * statistics.median(d.first for d in done),
        "itl_p50_ms": 1000 * statistics.median(gaps),
        "itl_p90_ms": 1000 * gaps[int(0.9 * (len(gaps) - 1))],
        "cached_tokens": sum(d.cached for d in done),
    }


async def prefix_effect(url: str, key: str, rounds: int, checks: Checks) -> dict[str, float]:
    """Time to first token of a prompt of about 3,000 tokens, cold and repeated."""
    headers = {"Authorization": f"Bearer {key}"}
    cold, warm = [], []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as client:
        for number in range(rounds):
            prompt = f"Long prompt {time.time_ns()} {number}. " + "def function(argument): return argument\n" * 300
            cold.append((await timed_stream(client, prompt, 4, checks)).first)
            repeated = await timed_stream(client, prompt, 4, checks)
            checks.that("a repeated prompt", repeated.cached > 0, "nothing of it was cached")
            warm.append(repeated.first)
    checks.require()
    return {
        "ttft_cold_ms": 1000 * statistics.median(cold),
        "ttft_repeated_ms": 1000 * statistics.median(warm),
        "ratio": statistics.median(w / c for w, c in zip(warm, cold, strict=True)),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks serving", description=__doc__)
    parser.add_argument("--url", help="base URL of the server (default: the one running with this SERVE_APP_HOME)")
    parser.add_argument("--home", type=Path, help="its state directory (default: SERVE_APP_HOME)")
    parser.add_argument("--concurrency", default="1,8,32", help="comma-separated numbers of parallel streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    settings = load_settings({"SERVE_APP_HOME": str(arguments.home)} if arguments.home else None)
    base = (arguments.url or read_attachment(settings.home).url) + f"/client/v4/accounts/{settings.account_id}/ai"
    key = api_key(settings)
    checks = Checks()
    asyncio.run(measure(base, key, 4, 8, f"warm-up {time.time_ns()}", checks))
    results = []
    for concurrency in (int(c) for c in arguments.concurrency.split(",")):
        runs = [
            asyncio.run(measure(base, key, concurrency, max(4, 2 * concurrency), f"run {time.time_ns()}", checks))
            for _ in range(arguments.rounds)
        ]
        median = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        print(", ".join(f"{name} {value:.1f}" for name, value in median.items()), flush=True)
        results.append(median)
    prefix = asyncio.run(prefix_effect(base, key, arguments.rounds, checks))
    print(", ".join(f"{name} {value:.2f}" for name, value in prefix.items()))
    if arguments.json:
        print(json.dumps({"benchmark": "serving", "model": MODEL, "load": results, "prefix": prefix}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
