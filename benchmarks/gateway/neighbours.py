"""What neighbours cost a request that stays, and what they do for a cluster that has too much to do.

``python -m benchmarks neighbours [--requests 2000] [--rate 30] [--json]``. The first part times a gateway's own look at
its neighbours, in microseconds of the thread that runs requests: while it is idle, where most requests end, and while
it is so busy that clusters are compared. The second is a simulation, for two clusters on one machine would take time
from each other: two clusters of ``--workers`` modelled engines each, with the product's dispatch in both and its policy
between them (:mod:`serve_app.routing.neighbours`), and what each tells the other a second old. All requests come to the
one; the other has a tenth of its own. Prompts and answers are made by seed, or are those of ``--trace``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.checks import Checks
from benchmarks.trace.engine import Job
from benchmarks.trace.measure import quantile
from benchmarks.trace.product import MAX_TOKENS, Product
from benchmarks.trace.requests import TraceRequest, read_trace, synthetic_rows, write_trace
from benchmarks.trace.simulate import Cluster
from benchmarks.trace.spec import ClusterSpec
from serve_app.routing.neighbours import Line, Option, Passing
from serve_app.routing.types import RouteRequest

ASK_EVERY_S = 1.0
PROBES = (64, 2048)
LOOKS = 5000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of the simulation (default 2000)")
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second at the busy cluster (default 30)")
    parser.add_argument("--workers", type=int, default=4, help="of each cluster (default 4)")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="a round trip (default 30)")
    parser.add_argument("--trace", type=Path, help="in Mooncake's format, in place of the synthetic one")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    arguments = parser.parse_args()
    checks = Checks()
    found: dict[str, Any] = {"look_us": asyncio.run(look_cost(checks))}
    trace = _trace(arguments)
    own = [replace(one, id=f"n{one.id}", at=one.at * 10) for one in trace[: len(trace) // 10]]
    found["simulated"] = {
        "alone": simulate(trace, own, arguments, passing=False, checks=checks),
        "with_neighbour": simulate(trace, own, arguments, passing=True, checks=checks),
    }
    found["answers_checked"] = checks.require()
    if arguments.json:
        print(json.dumps(found))
        return 0
    look = found["look_us"]
    print(f"a look at neighbours: {look['idle']:.2f} us idle, {look['busy']:.0f} us where clusters are compared")
    for name, row in found["simulated"].items():
        told = ", ".join(f"{key} {value}" for key, value in row.items())
        print(f"simulated, {name.replace('_', ' ')}: {told}")
    return 0


def _trace(arguments: argparse.Namespace) -> list[TraceRequest]:
    if arguments.trace is not None:
        found = read_trace(arguments.trace, limit=arguments.requests)
        span = max(found[-1].at, 1e-9)
        speed = arguments.rate * span / len(found)
        return [replace(one, at=one.at / speed) for one in found]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, synthetic_rows(arguments.requests, seed=20, rate=arguments.rate))
        return read_trace(path)


# -- what a look costs -----------------------------------------------------------------------------------------------


async def look_cost(checks: Checks) -> dict[str, float]:
    """Of a gateway with one neighbour: mean microseconds a request."""
    from serve_app.gateway.core import Gateway
    from serve_app.gateway.neighbours.passing import Neighbours
    from serve_app.gateway.settings import GatewaySettings, Listed
    from serve_app.sampling_params import SamplingParams
    from serve_app.state.callers.accounts import Caller
    from serve_app.tasks.backend import Prepared
    from serve_app.tasks.work import Work
    from serve_app.text.prompt import Prompt
    from serve_app.wire.neighbours import ModelOffer, Offers

    async def nobody(*_: Any) -> Any:
        raise RuntimeError("no worker is there")

    with tempfile.TemporaryDirectory() as folder:
        listed = (Listed("other", "http://127.0.0.1:9", "a key"),)
        settings = GatewaySettings("local", (), "s", folder, "local", neighbours=listed)
        gateway = Gateway(settings, nobody)
        joined = Neighbours(gateway, listed)
        model = next(model for model in gateway.models if gateway.engine.serves(model))
        dispatcher = gateway.engine.dispatcher(model)
        offer = ModelOffer(9.0, 0.05, 1e-4, 4, "same", b"", 256)
        joined._all[0].took(Offers("g", "a", 1, {model.id: offer}), 0.03, time.monotonic() + 1e6)
        joined._prints[model.id] = "same"
        joined._own[model.id] = Line(0.0, 0.05, 1e-4)
        model.elsewhere = model.ready = True
        for at in range(4):
            load = Cluster(ClusterSpec(workers=4), Product("p", ClusterSpec(workers=4)), 1.0)
            told = load.load_of(load.workers[at])
            dispatcher.policy.report(str(at), told, dispatcher.now())
        ids = np.arange(2000, dtype=np.int32) % 500
        request = SimpleNamespace(n=1, adapter=None, prompt_only=False, sampling=SamplingParams())
        prepared = Prepared(request, len(ids), Prompt(ids))  # type: ignore[arg-type]
        work = Work(Caller("local"), model, b"salt")

        async def looks() -> float:
            taken = []
            for number in range(LOOKS):
                route = RouteRequest(f"r{number}", len(ids), tenant="local", arrived_at=dispatcher.now())
                began = time.thread_time()
                passed = await joined.passed(prepared, work, route, dispatcher)
                taken.append(time.thread_time() - began)
                checks.that("a look", passed is None, "the request was passed to a cluster that is busier")
            return statistics.fmean(taken) * 1e6

        idle = await looks()
        joined._own[model.id] = Line(5.0, 0.05, 1e-4)
        busy = await looks()
        await joined.aclose()
        gateway.close()
    return {"idle": round(idle, 3), "busy": round(busy, 1)}


# -- what they do ----------------------------------------------------------------------------------------------------


class _Sided(Product):
    """One of two clusters: what is better off in the other is passed to it."""

    def join(self, other: _Sided, latency_s: float, passing: bool) -> None:
        self.other, self.latency_s, self.passing = other, latency_s, passing
        self.choice = Passing()
        self.line: Line | None = None  # as the other told it
        self.told_at = -ASK_EVERY_S
        self.sent = 0
        self.passed = 0
        self.late: set[str] = set()  # what came from the other
        self.first: list[float] = []

    def arrive(self, request: TraceRequest, now: float) -> None:
        if self.passing and self._goes(request, now):
            self.passed += 1
            there = self.other
            there.late.add(request.id)
            there._cluster.at(now + self.latency_s / 2, "call", lambda at: Product.arrive(there, request, at))
            return
        super().arrive(request, now)

    def started(self, job: Job) -> None:
        self.first.append(self._cluster.now - job.at + (self.latency_s / 2 if job.id in self.late else 0.0))
        super().started(job)

    def tell(self, now: float) -> Line | None:
        """As a gateway tells it: see :mod:`serve_app.gateway.neighbours.ahead`."""
        found = [self._predict(tokens, (), now) for tokens in PROBES]
        if found[0] is None or found[1] is None:
            return None
        (wait, short), (_, long) = found[0], found[1]
        token = max((long - short) / (PROBES[1] - PROBES[0]), 0.0)
        return Line(wait, max(short - wait - token * PROBES[0], 0.0), token)

    def _predict(self, tokens: int, blocks: tuple[bytes, ...], now: float) -> tuple[float, float] | None:
        route = RouteRequest("probe", tokens, blocks, max_tokens=MAX_TOKENS, arrived_at=now)
        found = self.dispatchers[0].dispatch.predict(route, now)
        return None if found is None else (min(found.wait, found.ttft), found.ttft)

    def _goes(self, request: TraceRequest, now: float) -> bool:
        if now - self.told_at >= ASK_EVERY_S:
            self.line, self.told_at, self.sent = self.other.tell(now), now, 0
        own = self._predict(request.prompt, request.blocks, now)
        if self.line is None or own is None:
            return False
        option = Option("other", self.latency_s, self.line, 0, self.sent, self._spec.workers)
        goes = self.choice.choose(own[1], request.prompt, [option]) is not None
        self.sent += request.prompt * goes
        return goes


def simulate(
    trace: list[TraceRequest], own: list[TraceRequest], arguments: argparse.Namespace, *, passing: bool, checks: Checks
) -> dict[str, Any]:
    """Both clusters on one clock. First tokens of requests that came to the busy one, and of the other's own."""
    spec = ClusterSpec(workers=arguments.workers, ttft_target=1e9)
    sides = [_Sided(name, spec, admit=False) for name in ("busy", "other")]
    clusters = [Cluster(spec, side, arguments.rate) for side in sides]
    sides[0].join(sides[1], arguments.latency_ms / 1e3, passing)
    sides[1].join(sides[0], arguments.latency_ms / 1e3, passing)
    for cluster, requests in zip(clusters, (trace, own), strict=True):
        cluster.begin(requests)
    every = len(trace) + len(own)
    while sum(len(cluster.result.done) for cluster in clusters) < every:
        min(clusters, key=lambda cluster: cluster.next_at).step()
    done = {name for cluster in clusters for name in cluster.result.done}
    checks.that("the simulation", len(done) == every, f"{len(done)} of {every} requests were served once")
    first = sides[0].first + sides[1].first
    return {
        "requests": every,
        "passed": sides[0].passed,
        "passed_back": sides[1].passed,
        "ttft_p50_s": round(quantile(first, 0.5), 3),
        "ttft_p90_s": round(quantile(first, 0.9), 3),
        "ttft_p99_s": round(quantile(first, 0.99), 3),
    }
