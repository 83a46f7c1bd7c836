"""The command line of ``bench trace``: which policies, at which rates, and how the results are compared."""

from __future__ import annotations

import argparse
import json
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.checks import Checks
from benchmarks.trace.engine import decode_cost, prefill_alone
from benchmarks.trace.goodput import highest
from benchmarks.trace.ideal import ideal_ttft, known_rate, rate_bounds
from benchmarks.trace.measure import Result, quantile, table
from benchmarks.trace.policies import EXPLAINED, POLICIES, build, variants
from benchmarks.trace.requests import (
    TraceRequest,
    beside_each_other,
    read_trace,
    unlimited_hit_ratio,
    unlimited_misses,
    with_adapters,
)
from benchmarks.trace.shapes import SHAPES, shaped
from benchmarks.trace.simulate import Cluster
from benchmarks.trace.spec import RECORD_KV_TOKENS, RECORD_SEQS, ClusterSpec

# First token and mean gap, seconds.
TARGETS = "1/0.05,2/0.05,1/0.025"
FAILED = 0.1  # of the requests may miss a target at a rate that counts


Job = tuple[str, float, ClusterSpec, list[TraceRequest], int, str]


def simulate(job: Job, *, most_bad: int | None = None) -> dict[str, Any]:
    """One variant at one rate; ``most_bad``: see :meth:`Cluster.run`."""
    name, rate, spec, trace, seed, shape = job
    replayed = shaped(trace, shape, rate, seed)
    result = Cluster(spec, build(name, spec, seed), rate).run(replayed, most_bad=most_bad)
    ended_early = most_bad is not None and result.refused + len(result.done) - result.good > most_bad
    return {"variant": name, **result.summary(), "problem": None if ended_early else problem(result, replayed)}


def problem(result: Result, trace: list[TraceRequest]) -> str | None:
    """Every request of the trace has ended once, with all of its tokens, or was refused."""
    wanted = {request.id: request.output for request in trace}
    if len(set(result.done)) != len(result.done) or not wanted.keys() >= set(result.done):
        return "a request has ended twice, or was never sent"
    if len(result.done) + result.refused != len(trace):
        return f"{len(result.done)} requests ended and {result.refused} were refused, of {len(trace)}"
    tokens = sum(wanted[name] for name in result.done)
    if result.output_tokens != tokens:
        return f"{result.output_tokens} tokens instead of {tokens}"
    return None if len(result.ttft) == len(result.done) else f"{len(result.ttft)} of them had a first token"


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The variant with the lowest p90 TTFT; one that never gets there counts as infinite."""
    return min(rows, key=lambda row: row["ttft_p90_ms"] if row["ttft_p90_ms"] is not None else float("inf"))


def compare(best: dict[tuple[str, float], dict[str, Any]], rates: list[float], unlimited: float) -> dict[str, Any]:
    """The figures that issue targets speak of, as far as the policies they need have been run."""

    def value(policy: str, rate: float, field: str) -> float | None:
        return best.get((policy, rate), {}).get(field)

    found: dict[str, Any] = {"unlimited_hit_ratio_in_arrival_order": round(unlimited, 4)}
    for rate in rates:
        row: dict[str, Any] = {}
        ours = best.get(("product", rate))
        if ours is None:
            continue
        row["hit_ratio_over_unlimited"] = _ratio(ours["hit_ratio"], unlimited)
        row["ttft_p90_over_kv_router"] = _ratio(ours["ttft_p90_ms"], value("kv", rate, "ttft_p90_ms"))
        row["itl_p90_kv_router_over_ours"] = _ratio(value("kv", rate, "itl_p90_ms"), ours["itl_p90_ms"])
        row["itl_p90_all_mixed_pool_over_ours"] = _ratio(value("mixed", rate, "itl_p90_ms"), ours["itl_p90_ms"])
        both = [v for p in ("mixed", "split") if (v := value(p, rate, "ttft_p90_ms")) is not None]
        row["ttft_p90_over_better_of_mixed_and_split"] = _ratio(ours["ttft_p90_ms"], min(both)) if both else None
        found[f"x{rate:g}"] = row
    return found


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above is not None and below else None


def _ideal(trace: list[TraceRequest], missed: list[int], spec: ClusterSpec, rate: float) -> dict[str, float]:
    """Without decoding, with all workers or three quarters of them; see :func:`ideal_ttft`."""
    arrivals = [request.at / rate for request in trace]
    found = {}
    for workers in (spec.workers, max(1, spec.workers * 3 // 4)):
        for shared in (False, True):
            name = f"{workers} workers" + ", prompts shared" * shared
            found[name] = _p90_ms(ideal_ttft(arrivals, missed, workers, spec.chunk, shared=shared))
    return found


def _p90_ms(seconds: list[float]) -> float:
    return round(quantile(seconds, 0.9) * 1e3, 1)


def goodput(arguments: argparse.Namespace, spec: ClusterSpec, trace: list[TraceRequest]) -> list[dict[str, Any]]:
    """The highest rate of each policy at each pair of targets, as rows."""
    checks, rows = Checks(), []
    base = (len(trace) - 1) / max(trace[-1].at - trace[0].at, 1e-9)
    for pair in arguments.targets.split(","):
        ttft, itl = map(float, pair.split("/"))
        machine = replace(spec, ttft_target=ttft, itl_target=itl)

        def tries(variant: str, rate: float, machine: ClusterSpec = machine) -> dict[str, Any]:
            job = variant, rate, machine, trace, arguments.seed, arguments.shape
            row = simulate(job, most_bad=int(FAILED * len(trace)))
            checks.add(f"{row['policy']} at {rate:g}x", row.pop("problem"))
            checks.require()
            return row

        known = known_rate(trace, unlimited_misses(trace), machine, arguments.shape, 1.0 - FAILED)
        rows.append(
            {"ttft_target_s": ttft, "itl_target_s": itl, "asked": "everything known", "goodput_x": round(known, 2)}
        )
        if not arguments.json:
            print(f"{ttft:g} s / {itl * 1e3:g} ms  everything known {known:.2f}x, which no policy is (ideal.py)")
        for policy in arguments.policies.split(","):
            names = variants(policy, machine, admitted=True) if policy in POLICIES else [policy]
            found = highest(tries, names, start=arguments.start, share=1.0 - FAILED)
            ours = {"ttft_target_s": ttft, "itl_target_s": itl, "asked": policy, "runs": found.runs}
            rate = {"goodput_x": round(found.rate, 2), "goodput_per_s": round(found.rate * base, 2)}
            rows.append({**ours, **found.row, **rate})
            if not arguments.json:
                row = rows[-1]
                print(
                    f"{ttft:g} s / {itl * 1e3:g} ms  {policy:9} {row['goodput_x']:6.2f}x {row['goodput_per_s']:7.2f}/s"
                    f"  ttft {row['ttft_p50_ms']} {row['ttft_p90_ms']} {row['ttft_p99_ms']}"
                    f"  itl {row['itl_p50_ms']} {row['itl_p90_ms']} {row['itl_p99_ms']}  refused {row['refused']}"
                    f"  {row['roles']}  {row['policy']} ({found.runs} runs)",
                    flush=True,
                )
    return rows


def machine(arguments: argparse.Namespace) -> ClusterSpec:
    """What is simulated."""
    spec = ClusterSpec(
        workers=arguments.workers,
        blocks=arguments.blocks or 5859 * arguments.workers,
        nodes=arguments.nodes,
        zones=arguments.zones,
        gateways=arguments.gateways,
        owner=not arguments.no_owner,
        link_bytes_s=arguments.link * 1e9,
        guessed=arguments.guessed_links,
        early_handover=not arguments.late_handover,
        decode_cost=arguments.decode_cost,
        ttft_target=arguments.ttft_target,
        itl_target=arguments.itl_target,
    )
    if arguments.record_memory:
        spec = replace(spec, kv_tokens=RECORD_KV_TOKENS, max_seqs=RECORD_SEQS)
    if arguments.speeds:
        spec = replace(spec, gpus=tuple((1.0 / float(speed), 1.0) for speed in arguments.speeds.split(",")))
    if arguments.gpus:
        kinds = [tuple(map(float, kind.split(":"))) for kind in arguments.gpus.split(",")]
        spec = replace(spec, gpus=tuple((slow, room) for slow, room in kinds))
    return spec


def run(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.live:
        from benchmarks.trace.live import replay

        return replay(arguments)
    spec = machine(arguments)
    limit = arguments.limit or (1500 if arguments.quick else None)
    trace = read_trace(arguments.trace, limit=limit)
    # What no worker has room for is no matter of routing.
    trace = [r for r in trace if r.prompt + r.output <= spec.largest]
    if arguments.copies > 1:
        trace = beside_each_other(trace, arguments.copies)
    if arguments.adapters:
        trace = with_adapters(trace, arguments.adapters)
    if arguments.goodput:
        found = goodput(arguments, spec, trace)
        if arguments.json:
            print(json.dumps(_shown(arguments, spec, trace) | {"rows": found}))
        return 0
    rates = [float(r) for r in (arguments.rates or ("4,8" if arguments.quick else "1,2,4,6,8,10")).split(",")]
    policies = arguments.policies.split(",")
    jobs = [
        (variant, rate, spec, trace, arguments.seed, arguments.shape)
        for rate in rates
        for policy in policies
        for variant in variants(policy, spec)
    ]
    rows, checks = [], Checks()
    with ProcessPoolExecutor(max_workers=arguments.jobs) as pool:
        for row in pool.map(simulate, jobs):
            checks.add(f"{row['policy']} at {row['rate']:g}x", row.pop("problem"))
            checks.require()
            rows.append(row)
            if not arguments.json:
                print(table([row]).splitlines()[1] if len(rows) > 1 else table([row]), flush=True)
    best = {}
    for rate in rates:
        for policy in policies:
            names = variants(policy, spec)
            # One split or one overlap weight may be asked for by name, as split:6 or kv:4.
            best[policy.partition(":")[0], rate] = best_of(
                [r for r in rows if r["rate"] == rate and r["variant"] in names]
            )
    unlimited = unlimited_hit_ratio(trace)
    targets = compare(best, rates, unlimited)
    # No routing gets below this: nothing queued, an unlimited cache, a prompt on one worker.
    missed = unlimited_misses(trace)
    targets["ttft_p90_floor_ms"] = _p90_ms([prefill_alone(tokens, spec.chunk) for tokens in missed])
    targets["ttft_p90_ideal_ms"] = {f"x{rate:g}": _ideal(trace, missed, spec, rate) for rate in rates}
    cost = decode_cost(spec.decode_cost, spec.kv_tokens)
    bounds = rate_bounds(trace, missed, spec.workers, cost, spec.kv_tokens, 1.0 - FAILED)
    targets["rate_bound_of_all_and_of_the_nine_tenths_with_least_work"] = [round(bound, 2) for bound in bounds]
    if arguments.json:
        print(json.dumps(_shown(arguments, spec, trace) | {"rows": rows, "compared": targets}))
        return 0
    print("\nThe best variant of each policy (modelled engines, everything else is the product's own code):\n")
    print(table(list(best.values())))
    print()
    for name, value in targets.items():
        print(f"{name}: {json.dumps(value)}")
    return 0


def _shown(arguments: argparse.Namespace, spec: ClusterSpec, trace: list[TraceRequest]) -> dict[str, Any]:
    """What was simulated."""
    return {
        "benchmark": "trace",
        "trace": arguments.trace.name,
        "shape": arguments.shape,
        "requests": len(trace),
        "simulated": True,
        "step_costs": "ai-dynamo/dynamo mock engine, 8B model on H100",
        "cluster": {n: getattr(spec, n) for n in ClusterSpec.__slots__},
        "policies": {n: EXPLAINED.get(n.partition(":")[0], n) for n in arguments.policies.split(",")},
        "seed": arguments.seed,
        "machine": platform.platform(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="Mooncake's JSON lines")
    parser.add_argument("--rates", help="multiples of the recorded arrival rate, with commas between (1,2,4,6,8,10)")
    parser.add_argument("--policies", default="product,mixed,split,kv", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, help="cache in blocks of 512 tokens, of all workers (5859 a worker)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes with a pool each")
    parser.add_argument("--zones", type=int, default=1, help="that nodes and gateways lie in, one after another")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=0, help="so many of 50 MB, of which a worker holds 32")
    parser.add_argument("--no-owner", action="store_true", help="every gateway orders its own queue")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s between a node's pool and a worker, each way")
    parser.add_argument(
        "--guessed-links", type=float, default=0.0, help="workers begin with so many times what links do"
    )
    parser.add_argument("--record-memory", action="store_true", help="cache of running sequences as 8B records have it")
    parser.add_argument("--decode-cost", choices=["mocker", "linear"], default="mocker", help="of steps, by K/V")
    parser.add_argument("--speeds", help="of workers in turns, 1 is the modelled GPU: 1,0.4 has half of them at 0.4")
    parser.add_argument("--gpus", help="kinds of workers in turns, as SLOWNESS:SHARE OF MEMORY with commas between")
    parser.add_argument("--shape", choices=SHAPES, default="recorded", help="arrivals: as recorded, or other ones")
    parser.add_argument("--late-handover", action="store_true", help="decode fetches only when prefill has ended")
    parser.add_argument("--ttft-target", type=float, default=5.0, help="seconds; for goodput, and what admission holds")
    parser.add_argument("--itl-target", type=float, default=0.05, help="seconds; for goodput and the planner")
    parser.add_argument("--goodput", action="store_true", help="the highest rate at which 90 %% meet both targets")
    parser.add_argument("--targets", default=TARGETS, help=f"first token/gap in seconds, for --goodput ({TARGETS})")
    parser.add_argument("--start", type=float, default=4.0, help="the first rate that --goodput tries")
    parser.add_argument("--copies", type=int, default=1, help="so many of the trace beside each other")
    parser.add_argument("--limit", type=int, help="only the trace's first requests")
    parser.add_argument("--quick", action="store_true", help="1,500 requests at 4 and 8 times the rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    live = parser.add_argument_group("against a server")
    live.add_argument("--live", metavar="URL", help="base URL of a server, http://127.0.0.1:8000")
    live.add_argument("--key", default="", help="API key")
    live.add_argument("--model", default="@cf/pico/pico-instruct")
    live.add_argument("--scale", type=float, default=0.02, help="share of the recorded tokens per request")
    live.add_argument("--requests", type=int, default=60, help="how many of the trace's requests")
    live.add_argument("--duration", type=float, default=60.0, help="seconds over which they arrive")
    return parser
