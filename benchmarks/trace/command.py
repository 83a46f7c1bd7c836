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
from benchmarks.trace.baselines import KVAware
from benchmarks.trace.engine import prefill_alone
from benchmarks.trace.ideal import ideal_ttft
from benchmarks.trace.measure import Result, quantile, table
from benchmarks.trace.product import Product
from benchmarks.trace.requests import (
    BLOCK,
    TraceRequest,
    read_trace,
    unlimited_hit_ratio,
    unlimited_misses,
    with_adapters,
)
from benchmarks.trace.simulate import Cluster, ClusterSpec, Policy
from serve_app.routing.router import RouterConfig
from serve_app.routing.types import Role

OVERLAP_WEIGHTS = (1.0, 2.0, 4.0, 8.0, 1000.0)
SMALL_CHUNK = 2048
POLICIES = ("product", "blind", "unlimited", "mixed", "mixed-small-chunks", "split", "kv")
EXPLAINED = {
    "product": "one shared pool, roles moved by the planner, prefill and decode chosen together",
    "blind": "the product without knowing which worker has a request's adapter",
    "unlimited": "the product with a pool that never evicts",
    "mixed": "the product's router and shared pool, every worker does both",
    "mixed-small-chunks": f"the same with {SMALL_CHUNK} prompt tokens a step",
    "split": "the product's router and shared pool, fixed roles; the best of all splits at each rate",
    "kv": "a KV-aware router with exact knowledge over per-worker caches, mixed workers; the best of "
    f"overlap weights {', '.join(f'{w:g}' for w in OVERLAP_WEIGHTS)} at each rate",
}


def variants(name: str, spec: ClusterSpec) -> list[str]:
    """The runs that stand behind one policy's name."""
    if name == "kv":
        return [f"kv:{weight:g}" for weight in OVERLAP_WEIGHTS]
    if name == "split":
        n = spec.workers
        shares = sorted({min(n - 1, max(1, round(n * k / 8))) for k in range(1, 8)})
        return [f"split:{k}" for k in shares]
    return [name]


def build(name: str, spec: ClusterSpec, seed: int) -> Policy:
    """The policy of one variant."""
    kind, _, value = name.partition(":")
    base = RouterConfig(chunk_tokens=BLOCK, own_cache=False, early_handover=spec.early_handover, seed=seed)
    mixed: list[Role] = ["mixed"] * spec.workers
    if kind == "product":
        return Product("product", spec, router=base)
    if kind == "blind":
        return Product("blind to adapters", spec, router=base, blind=True)
    if kind == "unlimited":
        return Product("unlimited pool", spec, router=base, blocks=10**9)
    if kind == "mixed":
        return Product("all mixed, pool", spec, router=replace(base, split=False), roles=mixed, admit=False)
    if kind == "mixed-small-chunks":
        router = replace(base, split=False)
        return Product(f"all mixed, pool, chunks {SMALL_CHUNK}", spec, router=router, roles=mixed, admit=False)
    if kind == "split":
        k = int(value)
        roles: list[Role] = ["prefill"] * k + ["decode"] * (spec.workers - k)
        router = replace(base, strict_roles=True)
        return Product(f"split {k}P{spec.workers - k}D, pool", spec, router=router, roles=roles, admit=False)
    if kind == "kv":
        return KVAware(spec, float(value))
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")


def simulate(job: tuple[str, float, ClusterSpec, list[TraceRequest], int]) -> dict[str, Any]:
    """One variant at one rate."""
    name, rate, spec, trace, seed = job
    if name == "mixed-small-chunks":
        spec = replace(spec, chunk=SMALL_CHUNK)
    faster = [replace(request, at=request.at / rate) for request in trace]
    result = Cluster(spec, build(name, spec, seed), rate).run(faster)
    return {"variant": name, **result.summary(), "problem": problem(result, faster)}


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


def run(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.live:
        from benchmarks.trace.live import replay

        return replay(arguments)
    spec = ClusterSpec(
        workers=arguments.workers,
        blocks=arguments.blocks or 5859 * arguments.workers,
        nodes=arguments.nodes,
        gateways=arguments.gateways,
        link_bytes_s=arguments.link * 1e9,
        early_handover=not arguments.late_handover,
        ttft_target=arguments.ttft_target,
        itl_target=arguments.itl_target,
    )
    limit = arguments.limit or (1500 if arguments.quick else None)
    trace = read_trace(arguments.trace, limit=limit)
    if arguments.adapters:
        trace = with_adapters(trace, arguments.adapters)
    rates = [float(r) for r in (arguments.rates or ("4,8" if arguments.quick else "1,2,4,6,8,10")).split(",")]
    policies = arguments.policies.split(",")
    jobs = [
        (variant, rate, spec, trace, arguments.seed)
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
    if arguments.json:
        shown = {
            "benchmark": "trace",
            "trace": arguments.trace.name,
            "requests": len(trace),
            "simulated": True,
            "step_costs": "ai-dynamo/dynamo mock engine, 8B model on H100",
            "cluster": {n: getattr(spec, n) for n in ClusterSpec.__slots__},
            "policies": {n: EXPLAINED[n.partition(":")[0]] for n in policies},
            "seed": arguments.seed,
            "machine": platform.platform(),
            "rows": rows,
            "compared": targets,
        }
        print(json.dumps(shown))
        return 0
    print("\nThe best variant of each policy (modelled engines, everything else is the product's own code):\n")
    print(table(list(best.values())))
    print()
    for name, value in targets.items():
        print(f"{name}: {json.dumps(value)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks trace", description=__doc__)
    parser.add_argument("trace", type=Path, help="Mooncake's JSON lines")
    parser.add_argument("--rates", help="multiples of the recorded arrival rate, with commas between (1,2,4,6,8,10)")
    parser.add_argument("--policies", default="product,mixed,split,kv", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, help="cache in blocks of 512 tokens, of all workers (5859 a worker)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes with a pool each")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=0, help="so many of 50 MB, of which a worker holds 32")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s between a node's pool and a worker")
    parser.add_argument("--late-handover", action="store_true", help="decode fetches only when prefill has ended")
    parser.add_argument("--ttft-target", type=float, default=5.0, help="seconds; for goodput, and what admission holds")
    parser.add_argument("--itl-target", type=float, default=0.05, help="seconds; for goodput and the planner")
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
