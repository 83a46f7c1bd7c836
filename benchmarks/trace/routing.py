"""``serve-app bench routing``: decisions per second on one core, what reports and plans cost, and the index's memory.

A decision is everything a gateway does for a request: look its prefix up, price the workers, choose, reserve, and give
the reservation back when it ends. Seconds are the process's own CPU time, so that a busy machine does not count. Every
request must be placed, with a worker that is there, and nothing stay reserved.

A plan is what one gateway's planner does once a second with what all workers have reported, with a demand that changes:
roles must be those of all workers, and both kinds be there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import time
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from benchmarks.checks import Checks
from serve_app.costs.steps import StepSample
from serve_app.routing.admission import Admission
from serve_app.routing.costs import CostModel
from serve_app.routing.fairness import FairQueue
from serve_app.routing.locality import LocalityIndex
from serve_app.routing.planner import Demand, Planner
from serve_app.routing.prices import RouterConfig
from serve_app.routing.router import Router
from serve_app.routing.types import Decision, Refusal, RouteRequest, WorkerLoad
from serve_app.wire.load import MAX_SAMPLES

CHUNK = 512  # prompt tokens per key


def requests(count: int, talks: int, seed: int) -> list[RouteRequest]:
    """Prompts of 2,000 to 20,000 tokens, each in one of ``talks`` conversations."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        talk, length = draw.randrange(talks), draw.randint(4, 40)
        keys = [sha256(b"%d %d" % (talk, at)).digest() for at in range(length)]
        made.append(RouteRequest(str(number), length * CHUNK + 7, keys))
    return made


def decisions(workers: int, keys: int, count: int, seed: int) -> dict[str, Any]:
    """One gateway, ``workers`` workers, an index of ``keys`` keys that is full already."""
    index = LocalityIndex(keys)
    fill(index, keys)
    router = Router(CostModel(), index, RouterConfig(chunk_tokens=CHUNK, seed=seed))
    for number in range(workers):
        role = "prefill" if number % 2 else "decode"
        router.report(
            WorkerLoad(
                f"w{number}",
                f"n{number // 8}",
                role,
                running=number % 5,
                max_seqs=256,
                kv_blocks_used=100,
                kv_blocks_total=90_000,
            )  # fmt: skip
        )
    admission, checks = Admission(router, FairQueue()), Checks()
    work = requests(count, count // 6, seed)
    placed: list[Decision | Refusal | None] = []
    began = time.process_time()
    for at, request in enumerate(work):
        decision = admission.place(request, at * 0.1)
        if decision is not None:
            admission.finished(request.id)
        placed.append(decision)
    seconds = time.process_time() - began
    for decision in placed:
        there = isinstance(decision, Decision) and decision.decode in router.fleet.workers
        checks.that(f"a decision among {workers} workers", there, f"{decision}")
    checks.equal("tokens still reserved", (admission.in_flight.prefill, admission.in_flight.decode), (0, 0))
    checks.require()
    return {"workers": workers, "keys": keys, "decisions": count, "us_per_decision": round(seconds / count * 1e6, 1),
            "decisions_per_s": round(count / seconds)}  # fmt: skip


def reports(workers: int, seed: int) -> dict[str, Any]:
    """What a load report costs a gateway: one with nothing new in it, and one with as many measured steps as fit."""
    router = Router(CostModel(), LocalityIndex(200_000), RouterConfig(chunk_tokens=CHUNK, seed=seed))
    steps = tuple(StepSample(0, 0, 20, 40_000, 0.01) for _ in range(MAX_SAMPLES))
    loads = [WorkerLoad(f"w{i}", f"n{i // 8}", max_seqs=256, kv_blocks_total=90_000) for i in range(workers)]
    found: dict[str, Any] = {"workers": workers}
    for name, told, at in (("us_per_report", (), 1.0), ("us_per_full_report", steps, 1e6)):
        # Everybody is known before it is measured.
        for load in loads:
            router.report(replace(load, steps=steps, reported_at=at))
        count = max(workers, 1000)
        mine = [replace(loads[i % workers], steps=told, reported_at=at + 1 + i) for i in range(count)]
        began = time.process_time()
        for load in mine:
            router.report(load)
        found[name] = round((time.process_time() - began) / count * 1e6, 1)
    return found


def plans(workers: int, seconds: int, seed: int) -> dict[str, Any]:
    """Milliseconds of a plan, each second for so many: the mean, and the longest, in which roles are chosen anew."""
    draw, planner, checks = random.Random(seed), Planner(CostModel()), Checks()
    loads = [
        WorkerLoad(f"w{i}", f"n{i // 8}", max_seqs=256, kv_blocks_total=90_000, max_batch_tokens=8192)
        for i in range(workers)
    ]
    taken = []
    for second in range(seconds):
        # From nearly all prompts to nearly all streams and back.
        part = abs(second % 60 - 30) / 30
        demand = Demand(0.7 * workers * part, 3000.0 * workers * (1.0 - part), 4000.0, 8000.0 * workers * part)
        loads = [
            replace(load, running=draw.randrange(64), queued_prefill_tokens=draw.randrange(4096), kv_blocks_used=9_000)
            for load in loads
        ]
        began = time.process_time()
        plan = planner.plan(loads, demand, float(second), waiting_tokens=1000)
        taken.append(time.process_time() - began)
        checks.equal(f"roles of {workers} workers", plan.roles.keys(), {load.worker for load in loads})
        both = {"prefill", "decode"} <= set(plan.roles.values()) or set(plan.roles.values()) == {"mixed"}
        checks.that(f"roles of {workers} workers", both, "one of them is nobody's")
        loads = [replace(load, role=plan.roles.get(load.worker, load.role)) for load in loads]
    checks.require()
    return {"workers": workers, "plans": seconds, "ms_per_plan": round(sum(taken) / seconds * 1e3, 2),
            "longest_ms": round(max(taken) * 1e3, 2)}  # fmt: skip


def fill(index: LocalityIndex, keys: int) -> None:
    rng = np.random.default_rng(0)
    for at in range(0, keys, 1000):
        data = rng.bytes(32 * 1000)
        index.add([data[i : i + 32] for i in range(0, len(data), 32)], f"w{at % 8}")


def memory(keys: int) -> dict[str, Any]:
    """Bytes of an index with room for ``keys`` keys, all of them there; it has grown to that when it was half as large
    and full. A worker that is lost is taken out of it.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index, checks = LocalityIndex(keys // 2), Checks()
    fill(index, keys // 2)
    half = len(index)
    began = time.process_time()
    index.grow(keys)
    grown_s = time.process_time() - began
    checks.equal("keys of an index that grows", len(index), half)
    began = time.process_time()
    fill(index, keys)
    seconds = time.process_time() - began
    # Keys that meet in one place push each other out, more of them the smaller the index.
    checks.that("the index", 0.9 * keys <= len(index) <= keys, f"{len(index)} of {keys} keys are held")
    data = np.random.default_rng(0).bytes(32 * 1000)  # the first that were added
    some = [data[i : i + 32] for i in range(0, len(data), 32)]
    checks.that("keys of a worker", any(index.match([key]) for key in some), "none is known")
    began = time.process_time()
    index.remove_holder("w0")
    removed_s = time.process_time() - began
    checks.that("keys of a worker that is gone", not any(index.match([key]) for key in some), "some are still its own")
    checks.require()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"keys": keys, "held": len(index), "bytes": index.nbytes, "bytes_per_key": round(index.nbytes / keys, 1),
            "process_grew_bytes": grown, "keys_added_per_s": round(keys / seconds),
            "ms_to_grow": round(grown_s * 1e3, 1), "ms_to_forget_a_worker": round(removed_s * 1e3, 3)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks routing", description=__doc__)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--full", type=int, default=200_000, help="keys of the index that decisions look into")
    parser.add_argument("--plans", type=int, default=120, help="one a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    part = 10 if arguments.quick else 1
    count = arguments.decisions // part
    sizes = memory(arguments.keys // part)
    rows = [decisions(workers, arguments.full, count, arguments.seed) for workers in (8, 64, 1000)]
    told = [reports(workers, arguments.seed) for workers in (8, 64, 1000)]
    planned = [plans(workers, arguments.plans // part, arguments.seed) for workers in (8, 64, 1000)]
    if arguments.json:
        found = {"benchmark": "routing", "machine": platform.platform(), "memory": sizes, "rows": rows, "reports": told,
                 "plans": planned}  # fmt: skip
        print(json.dumps(found))
        return 0
    print(f"locality index: {sizes['keys']:,} keys in {sizes['bytes'] / 2**20:.0f} MiB, "
          f"{sizes['bytes_per_key']} bytes a key ({sizes['held']:,} held); "
          f"{sizes['ms_to_grow']} ms to grow to that, "
          f"{sizes['ms_to_forget_a_worker']} ms to forget a worker")  # fmt: skip
    for row in planned:
        print(f"{row['workers']:5} workers: {row['ms_per_plan']:6} ms a plan, the longest {row['longest_ms']}")
    for row in told:
        print(
            f"{row['workers']:5} workers: {row['us_per_report']:6} us a report, {row['us_per_full_report']} with steps"
        )
    for row in rows:
        print(f"{row['workers']:5} workers: {row['us_per_decision']:6} us a decision, {row['decisions_per_s']:,}/s")
    return 0
