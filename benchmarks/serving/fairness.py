"""A light tenant beside one that overloads the machine, and goodput under overload.

``python -m benchmarks fairness [--size 80m] [--rounds 3] [--itl-ms MS] [--json]``. Starts a server of its own with the
pico model, or with a random one of ``--size`` (no draft, one worker a stage) in a temporary home, and two accounts. The
target between tokens is ``--itl-ms``; left out, it is found with a server without target first.

* *light*: how long its requests take alone, and while another tenant has ten times as many under way; the rounds of
  the two alternate, so what else the machine does hits both alike.
* *goodput*: requests per second that began within their deadline and ended, at 1x and 4x the load the server sustains.
  What is refused or late counts as failed. Beside it how long a refusal took, at the client and in the gateway alone
  (from the tokenised prompt to the refusal, as ``GET /v1/requests/{id}`` tells it).

An answer has all of its tokens or is a refusal, and the light tenant is never refused: anything else ends it without
figures. Load and server share the machine: what takes the engine's time away is printed in cores, load generator,
gateway (with HAProxy), engine and the rest apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.engine.checkpoint import SIZES
from benchmarks.serving.processes import cpu_seconds
from benchmarks.serving.stack import running_stack, write_checkpoint
from benchmarks.serving.tenants import MODEL, Tally, Tenant, closed, run_for
from serve_app.catalog.load import BUILT_IN, PROJECT_ROOT
from serve_app.ray_private.environment import PORTS

LIGHT_STREAMS = 2
HEAVY_STREAMS = 20
DEADLINE_MS = 1500


def start_server(home: Path, port: int, itl_ms: float | None, weights: Path | None) -> subprocess.Popen:
    record = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    record["weights"]["path"] = str(weights or PROJECT_ROOT / record["weights"]["path"])
    if weights is not None:  # what a random model says repeats itself, which look-up would make the most of
        record |= {"dtype": "bfloat16", "speculation": {"tokens": 0}}
    record["draft"] = None
    local = record["serving"]["local"]
    del local["draft"]
    for stage in ("decode", "prefill"):
        local[stage] |= {"max_replicas": 1}
    if itl_ms is not None:
        local["targets"] = {"itl_s": itl_ms / 1e3}
    (home / "models").mkdir()
    (home / "models" / "pico-instruct.yaml").write_text(yaml.safe_dump(record))
    environment = {**os.environ, "SERVE_APP_HOME": str(home), "PORT": str(port)}
    environment |= {name: str(port + offset) for offset, name in enumerate(PORTS.values(), 1)}
    command = [sys.executable, "-m", "serve_app.cli", "serve", "--models", MODEL]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=PROJECT_ROOT)


@contextlib.contextmanager
def running(port: int, itl_ms: float | None, weights: Path | None) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A server in a home of its own."""
    with tempfile.TemporaryDirectory(prefix="serve-app-fairness-") as folder:
        server = start_server(Path(folder), port, itl_ms, weights)
        try:
            yield Path(folder), server
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(90)


async def ready(url: str, server: subprocess.Popen) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        until = time.monotonic() + 240
        while time.monotonic() < until:
            if server.poll() is not None:
                raise SystemExit("the server ended by itself; run `serve-app serve` to see why")
            try:
                answer = await client.get("/health")
                if answer.status_code == 200:
                    return
                if "deploy_failed" in answer.text:
                    raise SystemExit(f"the model does not start: {answer.text}")
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.5)
    raise SystemExit("the server did not become ready")


async def where_time_went(tenant: Tenant, tally: Tally, samples: int = 20) -> dict[str, float]:
    """Medians in ms over some requests: waiting in the gateway, from there to the first token, and the rest."""
    parts: dict[str, list[float]] = {"wait": [], "first token": [], "rest": []}
    for request_id in tally.answered_ids[-samples:]:
        events = (await tenant.get(f"/v1/requests/{request_id}"))["events"]
        at = {e["event"]: e["ms"] for e in events}
        if {"routed", "first token", "done"} <= set(at):
            parts["wait"].append(at["routed"])
            parts["first token"].append(at["first token"] - at["routed"])
            parts["rest"].append(at["done"] - at["first token"])
    return {name: round(statistics.median(values), 1) for name, values in parts.items() if values}


async def light_rounds(light: Tenant, heavy: Tenant, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of the light tenant's latencies, alone and beside ten times its streams."""
    ratios, alone_ms, beside_ms, heavy_served = [], [], [], []
    for _ in range(rounds):
        alone = await run_for(seconds, light, LIGHT_STREAMS)
        end, flood = asyncio.Event(), Tally()
        task = asyncio.create_task(closed(heavy, HEAVY_STREAMS, end, flood))
        await asyncio.sleep(1.0)
        beside = await run_for(seconds, light, LIGHT_STREAMS)
        end.set()
        await task
        refused = len(alone.refused) + len(beside.refused)
        light.checks.that("the light tenant", not refused, f"{refused} of its requests were refused")
        light.checks.require()
        heavy.checks.require()
        alone_ms.append(1e3 * statistics.median(alone.latencies))
        beside_ms.append(1e3 * statistics.median(beside.latencies))
        ratios.append(beside_ms[-1] / alone_ms[-1])
        heavy_served.append(flood.good / flood.seconds)
        print(
            f"light: alone {alone_ms[-1]:.1f} ms, beside {beside_ms[-1]:.1f} ms, ratio {ratios[-1]:.2f}; "
            f"heavy {heavy_served[-1]:.1f} requests/s"
        )
        alone_parts, beside_parts = await where_time_went(light, alone), await where_time_went(light, beside)
        print(f"  medians in ms: alone {alone_parts}, beside {beside_parts}", flush=True)
    return {
        "alone_ms": statistics.median(alone_ms),
        "beside_ms": statistics.median(beside_ms),
        "ratio": statistics.median(ratios),
        "heavy_requests_per_s": statistics.median(heavy_served),
    }


async def open_load(tenant: Tenant, rate: float, seconds: float) -> tuple[Tally, float]:
    """Requests at ``rate`` per second whatever becomes of them, each with the same deadline for its first token. The
    tally, and how many were served per second once the first ones could have been, as long as the load lasted.
    """
    tally, tasks = Tally(), []
    began = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(tenant.ask(tally, deadlineMs=DEADLINE_MS)))
    over = time.perf_counter()
    await asyncio.gather(*tasks)
    begin = began + DEADLINE_MS / 1e3
    return tally, sum(begin < at <= over for at in tally.finished) / (over - begin)


async def in_gateway_ms(tenant: Tenant, ids: list[str]) -> list[float]:
    """From the tokenised prompt to the refusal."""
    found = []
    for request_id in ids:
        events = (await tenant.get(f"/v1/requests/{request_id}"))["events"]
        if not any(e["event"] == "queued" for e in events):
            found.append(next(e["ms"] for e in events if e["event"] == "refused"))
    return found


class Cores:
    """Whose processor time it was: cores that load generator, gateway and engine used while it is open."""

    GROUPS = {"EngineWorker": "engine", "gateway": "gateway", "haproxy": "gateway"}

    def __init__(self, server: int) -> None:
        self._server = server
        self.used: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        before, began = self._now(), time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        for name, value in self._now().items():
            self.used.setdefault(name, []).append((value - before.get(name, 0.0)) / seconds)

    def _now(self) -> dict[str, float]:
        found = {"load": time.process_time(), "engine": 0.0, "gateway": 0.0, "other": 0.0}
        for title, seconds in cpu_seconds(self._server).items():
            found[next((group for part, group in self.GROUPS.items() if part in title), "other")] += seconds
        return found

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 2) for name, values in self.used.items()}


async def goodput_rounds(tenant: Tenant, server: int, rounds: int, seconds: float) -> dict[str, Any]:
    capacity = statistics.median([(t := await run_for(seconds, tenant, HEAVY_STREAMS)).good / t.seconds
                                  for _ in range(2)])  # fmt: skip
    one, four, refused, at_once = [], [], [], []
    shares, cores_1, cores_4 = [], Cores(server), Cores(server)
    for _ in range(rounds):
        with cores_1.during():
            at_1, served_1 = await open_load(tenant, capacity, 2 * seconds)
        with cores_4.during():
            at_4, served_4 = await open_load(tenant, 4 * capacity, 2 * seconds)
        tenant.checks.that("the load that can be sustained", served_1 > 0, "nothing was served in time")
        tenant.checks.require()
        one.append(served_1)
        four.append(served_4)
        refused += at_4.refused
        at_once += await in_gateway_ms(tenant, at_4.refused_ids[:200])
        shares.append(four[-1] / one[-1])
        print(f"goodput: 1x {one[-1]:.1f}/s ({len(at_1.refused)} refused, {at_1.late} late), 4x {four[-1]:.1f}/s "
              f"({len(at_4.refused)} refused, {at_4.late} late), share {shares[-1]:.2f}", flush=True)  # fmt: skip
    print(f"goodput: cores used at 1x {cores_1.medians()}, at 4x {cores_4.medians()}")
    return {
        "capacity_requests_per_s": capacity,
        "goodput_1x_per_s": statistics.median(one),
        "goodput_4x_per_s": statistics.median(four),
        "share": statistics.median(shares),
        "refusal_client_p50_ms": 1e3 * statistics.median(refused) if refused else None,
        "refusal_gateway_p50_ms": statistics.median(at_once) if at_once else None,
        "refusal_gateway_p99_ms": sorted(at_once)[int(0.99 * (len(at_once) - 1))] if at_once else None,
        "refused_at_once_share": len(at_once) / max(1, rounds * min(200, len(refused) // max(1, rounds))),
    }


async def alone_step_ms(url: str, home: Path, server: subprocess.Popen) -> float:
    """What a decode step takes with the light tenant's streams only, as the worker reports it."""
    await ready(url, server)
    light = Tenant(url, home, "light")
    await light.known()
    await run_for(3.0, light, LIGHT_STREAMS)
    key = f"Bearer {(home / 'api_key').read_text().strip()}"
    routing = (await light.get("/v1/status", Authorization=key))["models"][MODEL]["routing"]
    await light.client.close()
    return next(worker["step_ms"] for worker in routing["workers"] if worker["stage"] == "decode")


async def measure(url: str, home: Path, server: int, options: argparse.Namespace) -> dict[str, Any]:
    """``server``: the number of its first process."""
    rounds, seconds, parts = options.rounds, options.seconds, options.parts.split(",")
    light, heavy = Tenant(url, home, "light"), Tenant(url, home, "heavy")
    await light.known()
    await heavy.known()
    await run_for(min(3.0, seconds), heavy, HEAVY_STREAMS)  # learns what steps cost
    await run_for(min(1.0, seconds), light, LIGHT_STREAMS)
    found = {}
    if "light" in parts:
        found["light"] = await light_rounds(light, heavy, rounds, seconds)
    if "goodput" in parts:
        found["goodput"] = await goodput_rounds(heavy, server, rounds, seconds)
    for tenant in (light, heavy):
        await tenant.client.close()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks fairness", description=__doc__)
    parser.add_argument("--size", choices=SIZES, help="of a random model in place of pico-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase; goodput needs one or more")
    parser.add_argument("--parts", default="light,goodput", help="what to measure")
    parser.add_argument(
        "--itl-ms",
        type=float,
        help="the model's target between tokens (default: 1.25 times a step with light's streams)",
    )
    parser.add_argument("--port", type=int, default=8131)
    parser.add_argument("--home", type=Path, help="measure the server that runs with this state directory, as it is")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="serve-app-fairness-") as folder:
        weights = write_checkpoint(Path(folder) / "model", arguments.size) if arguments.size else None
        itl_ms, found = run(arguments, weights)
    for part, figures in found.items():
        print(f"{part}: " + ", ".join(f"{n} {v:.2f}" for n, v in figures.items() if v is not None))
    if arguments.json:
        model = f"random, {arguments.size}" if arguments.size else MODEL
        print(json.dumps({"benchmark": "fairness", "model": model, "itl_ms": itl_ms, **found}))
    return 0


def run(arguments: argparse.Namespace, weights: Path | None) -> tuple[float | None, dict[str, Any]]:
    """The target between tokens in ms (None: as the server has it), and what was measured."""
    if arguments.home is not None:
        stack = running_stack(arguments.home)
        return None, asyncio.run(measure(stack.url, arguments.home, stack.pid, arguments))
    url, itl_ms = f"http://127.0.0.1:{arguments.port}", arguments.itl_ms
    if itl_ms is None:
        with running(arguments.port, None, weights) as (home, server):
            itl_ms = round(1.25 * asyncio.run(alone_step_ms(url, home, server)), 2)
        print(f"target between tokens: {itl_ms} ms", flush=True)
    with running(arguments.port, itl_ms, weights) as (home, server):
        asyncio.run(ready(url, server))
        return itl_ms, asyncio.run(measure(url, home, server.pid, arguments))


if __name__ == "__main__":
    raise SystemExit(main())
