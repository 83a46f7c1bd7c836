"""What a token costs on the channel: CPU per token at both ends, over a loopback socket.

``python -m benchmarks channel [--streams 64] [--steps 2000] [--json]``. Every stream must bring every token once and in
order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.checks import Checks
from serve_app.channel.inbox import Stream, TokenInbox
from serve_app.channel.sender import TokenSender
from serve_app.sampling_params import TokenLogprobs
from serve_app.wire.address import InboxAddress
from serve_app.wire.tokens import TokenItem


async def _gateway(pipe: Connection, streams: int) -> None:
    inbox = TokenInbox()
    address = await inbox.start()
    opened = [inbox.open_stream(f"stream-{i}") for i in range(streams)]
    pipe.send((address.host, address.port, address.secret))

    async def read(stream: Stream) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        lags: list[float] = []
        async for item in stream:
            tokens += item.ids
            if item.logprobs:
                lags.append(time.perf_counter() - item.logprobs[0].logprob)
        return tokens, lags

    cpu = time.process_time()
    results = await asyncio.gather(*(read(stream) for stream in opened))
    cpu = time.process_time() - cpu
    pipe.send(
        {
            "cpu_s": cpu,
            "tokens": [tokens for tokens, _ in results],
            "lags": [lag for _, lags in results for lag in lags],
        }
    )
    await inbox.aclose()


def _gateway_process(pipe: Connection, streams: int) -> None:
    asyncio.run(_gateway(pipe, streams))


async def _worker(address: InboxAddress, streams: int, steps: int, interval_s: float) -> dict[str, float]:
    sender = TokenSender("bench")
    names = [f"stream-{i}" for i in range(streams)]
    for name in names:
        sender.open(name, address)
    await asyncio.sleep(0.2)
    started, cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        # One time stamp in every step, in the place of a log-probability: perf_counter is one clock for all processes
        # of a machine.
        stamp = (TokenLogprobs(time.perf_counter(), []),)
        finish = "length" if step == steps - 1 else None
        sender.send([TokenItem(name, step, (step,), finish, stamp if i == 0 else None) for i, name in enumerate(names)])
        await asyncio.sleep(interval_s)
    while len(sender):
        await asyncio.sleep(0.01)
    result = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - started}
    await sender.aclose()
    return result


def run(streams: int, steps: int, interval_s: float) -> dict[str, Any]:
    """Figures of one run; CPU times in microseconds per token, lag (send to reader) in milliseconds."""
    here, there = multiprocessing.Pipe()
    gateway = multiprocessing.get_context("spawn").Process(target=_gateway_process, args=(there, streams))
    gateway.start()
    worker = asyncio.run(_worker(InboxAddress(*here.recv()), streams, steps, interval_s))
    reader = here.recv()
    gateway.join()
    tokens = streams * steps
    checks = Checks()
    for received in reader["tokens"]:
        checks.equal("tokens of a stream", received, list(range(steps)))
    checks.require()
    lags = sorted(reader["lags"])
    return {
        "streams": streams,
        "steps": steps,
        "tokens_per_s": round(tokens / worker["wall_s"]),
        "worker_us_per_token": round(worker["cpu_s"] / tokens * 1e6, 2),
        "gateway_us_per_token": round(reader["cpu_s"] / tokens * 1e6, 2),
        "lag_p50_ms": round(statistics.median(lags) * 1e3, 3),
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1e3, 3),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks channel", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--interval-ms", type=float, default=5.0, help="time between engine steps")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    result = run(options.streams, options.steps, options.interval_ms / 1e3)
    if options.json:
        print(json.dumps({"benchmark": "channel", **result}))
        return 0
    for name, value in result.items():
        print(f"{name:24} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
