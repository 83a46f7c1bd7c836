"""Tile sizes of the paged attention kernel on this GPU: what the plan chooses beside what else there is.

    python -m benchmarks gpu_tune [--heads 32,8,128] [--dtype bfloat16] [--json]

Each case is a batch of prompts, chunks or decodes. Launches alternate in rounds; the figure of each is its median. A
plan that is more than 5 % behind the best is worth a change in `plan_launch` (`serve_app/kernels/gpu/plan.py`).
The last columns are the best one's products per second and bytes of keys and values read per second. A launch that runs
must give what plain torch gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from benchmarks.checks import Checks
from benchmarks.engine.kernels import ROUNDING
from serve_app.kernels.attention import paged_attention_torch
from serve_app.kernels.gpu.attention import paged_attention
from serve_app.kernels.gpu.choice import device_seconds
from serve_app.kernels.gpu.common import processors, shared_memory
from serve_app.kernels.gpu.plan import Launch, plan_launch
from serve_app.kernels.gpu.selftest import move
from serve_app.kernels.library.selftest import RandomBatch, random_batch

# name: new tokens of each request, cached tokens of each
CASES = {
    "4 prompts of 1024": ([1024] * 4, [0] * 4),
    "1 prompt of 4096": ([4096], [0]),
    "chunk of 512 behind 8192": ([512], [8192]),
    "32 prompts of 128": ([128] * 32, [0] * 32),
    "16 drafts of 4 behind 1000": ([5] * 16, [1000] * 16),
    "1 decode behind 4096": ([1], [4096]),
    "32 decodes behind 1000": ([1] * 32, [1000] * 32),
    "256 decodes behind 500": ([1] * 256, [500] * 256),
}
SMALL = {"2 prompts of 40": ([40, 40], [0, 0]), "2 decodes behind 100": ([1, 1], [100, 100])}


def launches(plan: Launch, batch: RandomBatch, group: int) -> list[Launch]:
    """The plan first; then other tiles of keys, warps and stages together, other rows or splits by themselves."""
    found = [plan]
    for block_n, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4, 5)):
        found.append(dataclasses.replace(plan, block_n=block_n, warps=warps, stages=stages))
    for splits in (plan.splits // 2, plan.splits * 2):
        if 1 <= splits <= 64:
            found.append(dataclasses.replace(plan, splits=splits))
    if batch.max_query_len > 1:
        for block_m in (plan.block_m // 2, plan.block_m * 2):
            if max(16, group) <= block_m <= 256:
                tiles = len(batch.q) // (block_m // group) + len(batch.seq_lens)
                found.append(dataclasses.replace(plan, block_m=block_m, tiles=tiles))
    return list(dict.fromkeys(found))


def wall_seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def tune(batch: RandomBatch, heads: tuple[int, int, int], rounds: int, most: int | None) -> dict[str, Any]:
    """Median seconds of the plan and of the best launch for one batch, and what does not run here."""
    q_heads, kv_heads, dim = heads
    clock = device_seconds if batch.q.is_cuda else wall_seconds
    plan = plan_launch(
        requests=len(batch.seq_lens), tokens=len(batch.q), max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len, group=q_heads // kv_heads, kv_heads=kv_heads, dim=dim,
        item_bytes=batch.q.element_size(), units=processors(batch.q.device), shared=shared_memory(batch.q.device),
    )  # fmt: skip

    def run(launch: Launch) -> torch.Tensor:
        return paged_attention(batch.q, batch.kv_layer, batch, scale=dim**-0.5, launch=launch)

    truth = paged_attention_torch(batch.q, batch.kv_layer, batch, scale=dim**-0.5).float()
    checks = Checks()
    times: dict[Launch, list[float]] = {}
    failed = 0
    for launch in launches(plan, batch, q_heads // kv_heads)[:most]:
        try:
            found = run(launch)  # compiles
        except Exception:  # more shared memory than there is, mostly
            failed += 1
            continue
        far = float((found.float() - truth).abs().max() / truth.abs().max())
        checks.that(f"{launch}", far <= ROUNDING[batch.q.dtype], f"{far:.2g} away from torch")
        times[launch] = []
    checks.require()
    for _ in range(rounds):
        for launch, taken in times.items():
            taken.append(clock(lambda launch=launch: run(launch)))
    medians = {launch: statistics.median(taken) for launch, taken in times.items()}
    best = min(medians, key=medians.__getitem__)
    return {"plan": dataclasses.asdict(plan), "plan_s": medians[plan], "best": dataclasses.asdict(best),
            "best_s": medians[best], "tried": len(medians), "failed": failed,
            "launches": [{**dataclasses.asdict(launch), "s": taken} for launch, taken in medians.items()]}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, head size")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", action="append", help="part of a case's name; several may be given (default all)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    q_heads, kv_heads, dim = (int(n) for n in options.heads.split(","))
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    found = {}
    for name, (queries, contexts) in (CASES if device.type == "cuda" else SMALL).items():
        if options.case and not any(part in name for part in options.case):
            continue
        batch = move(random_batch(queries, contexts, q_heads, kv_heads, dim, dtype, 0), device)
        with torch.inference_mode():
            result = tune(batch, (q_heads, kv_heads, dim), options.rounds, None if device.type == "cuda" else 3)
        # Query i of n behind c keys sees c + i + 1 of them; scores and values take two operations each.
        pairs = sum(n * c + n * (n + 1) // 2 for n, c in zip(queries, contexts, strict=True))
        result["tflops"] = 4 * pairs * q_heads * dim / result["best_s"] / 1e12
        result["gb_s"] = 2 * batch.total_seq_len * kv_heads * dim * dtype.itemsize / result["best_s"] / 1e9
        found[name] = result
        best = " ".join(f"{key} {value}" for key, value in result["best"].items())
        print(
            f"{name:28} plan {1e6 * result['plan_s']:8.1f} us   best {1e6 * result['best_s']:8.1f} us "
            f"({result['plan_s'] / result['best_s']:.2f}x: {best})   {result['tflops']:6.1f} TFLOP/s "
            f"{result['gb_s']:6.0f} GB/s   {result['tried']} launches, {result['failed']} do not run here",
            flush=True,
        )
    if options.json:
        print(json.dumps({"benchmark": "gpu_tune", "heads": options.heads, "dtype": options.dtype, "cases": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
