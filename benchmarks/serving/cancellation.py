"""How long an engine goes on for a client that has left.

``python -m benchmarks cancellation [--requests 100] [--json]`` starts the local stack, sends requests that would
generate for a long time, closes the connection in the middle, and asks the decode worker through Serve, over and over,
until it runs nothing any more. What is given is the time from the close until the answer "nothing", so it holds up to
one such question (``asking_ms``) too much. Streams are closed after their third event, others once the worker is busy.
A stream that does not begin with three right events, or an engine that is not busy then, ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS
from benchmarks.checks import Checks, sse_data
from benchmarks.serving.stack import local_stack
from benchmarks.serving.startup import MODEL
from serve_app.wire.replicas import read_counters

TOKENS = 1500


class Engine:
    """The decode worker as a driver of the same cluster sees it."""

    def __init__(self, home: Path) -> None:
        from serve_app.cluster import attach

        attach(home)
        from ray import serve

        from serve_app.tasks.model import application_name

        self._handle = serve.get_deployment_handle("Decode", application_name(MODEL))

    def running(self) -> int:
        """Requests in the engine, those in its queue included."""
        told = read_counters(self._handle.stats.remote().result(timeout_s=10)).numbers
        return told["running"] + told["waiting"]

    def wait(self, busy: bool, seconds: float = 30.0) -> float:
        """When the worker was found as wanted, on the monotonic clock."""
        until = time.monotonic() + seconds
        while (self.running() > 0) is not busy:
            if time.monotonic() > until:
                raise SystemExit(
                    f"no figures: the engine did not become {'busy' if busy else 'free'} within {seconds:g} s"
                )
        return time.monotonic()


async def cancelled(engine: Engine, port: int, key: str, checks: Checks, *, stream: bool, end: str) -> float:
    """Seconds from the close of a request's connection until the engine was free."""
    question = [{"role": "user", "content": "What does itertools.chain do?"}]
    asked = {"model": MODEL, "messages": question, "max_tokens": TOKENS, "stream": stream, "logit_bias": {end: -100}}
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    if stream:
        came = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        status = int(came[9:12])
        for _ in range(3 if status == 200 else 0):
            came += await asyncio.wait_for(reader.readuntil(b"\n\n"), 30)
        deltas = [json.loads(data)["choices"][0]["delta"] for data in sse_data(came)]
        right = status == 200 and len(deltas) == 3 and all("content" in delta for delta in deltas)
        checks.that("a stream's beginning", right, f"status {status}: {came[-200:].decode(errors='replace')!r}")
        checks.require()
    await asyncio.to_thread(engine.wait, True)
    writer.close()
    left = time.monotonic()
    return await asyncio.to_thread(engine.wait, False) - left


def end_token() -> str:
    """The id, as a JSON key, of the token that ends answers: without it they are as long as asked for."""
    folder = CHECKPOINTS / "pico-instruct"
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return str(end[0] if isinstance(end, list) else end)


def figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * s for s in seconds)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
        "most_ms": ordered[-1],
    }


def measure(home: Path, port: int, key: str, requests: int) -> dict[str, Any]:
    engine, checks = Engine(home), Checks()
    engine.wait(False)
    end = end_token()
    asking = []
    for _ in range(50):
        began = time.monotonic()
        engine.running()
        asking.append(time.monotonic() - began)
    results: dict[str, Any] = {"asking_ms": 1000 * statistics.median(asking)}
    for name, stream in (("streamed", True), ("whole", False)):
        found = [asyncio.run(cancelled(engine, port, key, checks, stream=stream, end=end)) for _ in range(requests + 3)]
        results[name] = figures(found[3:])
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of each kind")
    parser.add_argument("--port", type=int, default=8125)
    parser.add_argument("--home", type=Path, help="measure the server that runs with this state directory")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    from serve_app.config import load_settings

    home = options.home or load_settings({**os.environ}).home
    with local_stack(options.port, options.home) as stack:
        results = measure(home, int(stack.url.rpartition(":")[2]), stack.key, options.requests)
    print(f"asking the engine takes {results['asking_ms']:.1f} ms, which is in the following")
    for name in ("streamed", "whole"):
        print(f"{name:9}" + ", ".join(f"{figure} {value:.1f}" for figure, value in results[name].items()))
    if options.json:
        print(json.dumps({"benchmark": "cancellation", "requests": options.requests, **results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
