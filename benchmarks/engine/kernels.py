"""CPU kernels against what plain torch offers, alternating round by round: ``python -m benchmarks kernels
[--json]``.

Prints the median time of each side, the ratio, the bytes read per second, and the machine's own read
bandwidth taken in the same run, since shared memory makes absolute figures drift. All sides must have given the same
numbers, within what the type rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.checks import Checks
from serve_app.kernels.attention import paged_attention
from serve_app.kernels.batch import BLOCK
from serve_app.kernels.library.load import load
from serve_app.kernels.library.selftest import RandomBatch, random_batch
from serve_app.kernels.linear.packed import PackedLinear, packing_available
from serve_app.kernels.linear.panels import PanelStore, panel_bytes, panel_library
from serve_app.kernels.reference.attention import paged_attention_torch

# Largest difference of two sides, over the largest number.
ROUNDING = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# name: context per request, query heads, KV heads, head_dim
DECODE = {
    "decode 1 x 512": ([512], 16, 8, 128),
    "decode 1 x 2048": ([2048], 16, 8, 128),
    "decode 32 x 160": ([160] * 32, 14, 2, 64),
    "decode 16 x 100..1300": ([100 + 80 * i for i in range(16)], 16, 8, 128),
}
LINEARS = [(320, 864), (4864, 896), (8192, 2048)]  # out, in


def alternate(sides: dict[str, Callable[[], Any]], rounds: int, budget: float) -> dict[str, float]:
    """Median seconds per call of each side; every round runs all sides for about ``budget`` seconds in
    total."""
    repeats = {}
    for name, call in sides.items():
        call()
        started = time.perf_counter()
        call()
        once = time.perf_counter() - started
        repeats[name] = max(1, min(200, int(budget / len(sides) / max(once, 1e-6))))
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            started = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            taken[name].append((time.perf_counter() - started) / repeats[name])
    return {name: statistics.median(values) for name, values in taken.items()}


def read_bandwidth(rounds: int = 7, megabytes: int = 256) -> float:
    """Median GB/s of summing an array much larger than the caches."""
    data = torch.ones(megabytes * (1 << 18))
    return data.numel() * 4 / alternate({"sum": data.sum}, rounds, 0.0)["sum"] / 1e9


def sdpa_loop(b: RandomBatch, scale: float) -> torch.Tensor:
    """Decode the obvious way: per request, gather the blocks and call SDPA with its own grouped-query
    option."""
    rows = []
    for r, length in enumerate(b.seq_lens.tolist()):
        blocks = b.block_tables[r, : -(-length // BLOCK)].long()
        keys, values = (p[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length] for p in b.kv_layer)
        rows.append(
            F.scaled_dot_product_attention(b.q[r][None, :, None], keys, values, scale=scale, enable_gqa=True)[0, :, 0]
        )
    return torch.stack(rows)


def same(checks: Checks, where: str, sides: dict[str, Callable[[], Any]], dtype: torch.dtype) -> None:
    """Every side's numbers beside those of the last one, which is torch's own."""
    *names, truth = sides
    wanted = sides[truth]().float()
    for name in names:
        got = sides[name]().float()
        far = float("inf") if got.shape != wanted.shape else float((got - wanted).abs().max() / wanted.abs().max())
        checks.that(f"{where}, {name}", far <= ROUNDING[dtype], f"{far:.2g} away from {truth}")


def attention_rows(rounds: int, checks: Checks, cases: int | None = None) -> list[dict[str, Any]]:
    rows = []
    for label, dtype in DTYPES.items():
        for name, (contexts, q_heads, kv_heads, dim) in list(DECODE.items())[:cases]:
            b = random_batch([1] * len(contexts), contexts, q_heads, kv_heads, dim, dtype, 0)
            scale = dim**-0.5
            sides: dict[str, Callable[[], Any]] = {
                "ours": partial(paged_attention, b.q, b.kv_layer, b, scale=scale),
                "torch": partial(paged_attention_torch, b.q, b.kv_layer, b, scale=scale),
                "sdpa": partial(sdpa_loop, b, scale),
            }
            same(checks, f"attention {label} {name}", sides, dtype)
            read = int(b.seq_lens.sum()) * 2 * kv_heads * dim * dtype.itemsize
            rows.append(row(f"attention {label} {name}", alternate(sides, rounds, 0.06), read, "sdpa"))
    return rows


def each(calls: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """The last one's numbers."""
    for call in calls:
        found = call(x)
    return found


def linear_rows(rounds: int, checks: Checks, cases: int | None = None) -> list[dict[str, Any]]:
    rows = []
    for label, dtype in DTYPES.items():
        if not packing_available(dtype):
            continue
        for out_features, in_features in LINEARS[:cases]:
            # Enough copies to leave the last-level cache, as the layers of a real model do.
            copies = max(1, min(8, (64 << 20) // (out_features * in_features * dtype.itemsize)))
            weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(copies)]
            library = panel_library() if dtype == torch.bfloat16 else None
            store = PanelStore(library, sum(panel_bytes(w) for w in weights), compact=False) if library else None
            packed = [PackedLinear(w, None, store) for w in weights]
            for m in (1, 8, 32):
                x = torch.randn(m, in_features).to(dtype)
                sides: dict[str, Callable[[], Any]] = {
                    "ours": partial(each, packed, x),
                    "linear": partial(each, [partial(F.linear, weight=w) for w in weights], x),
                }
                same(checks, f"linear {label} {out_features}x{in_features} m={m}", sides, dtype)
                seconds = {k: v / copies for k, v in alternate(sides, rounds, 0.06).items()}
                read = out_features * in_features * dtype.itemsize
                rows.append(row(f"linear {label} {out_features}x{in_features} m={m}", seconds, read, "linear"))
    return rows


def row(name: str, seconds: dict[str, float], read: int, peer: str) -> dict[str, Any]:
    return {
        "name": name,
        "microseconds": {k: round(v * 1e6, 1) for k, v in seconds.items()},
        "ratio": round(seconds[peer] / seconds["ours"], 2),
        "peer": peer,
        "read_gb_per_s": round(read / seconds["ours"] / 1e9, 1),
    }


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's default")
    parser.add_argument("--quick", action="store_true", help="the first shapes only, once")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    found, why = load()
    bandwidth = [read_bandwidth()]
    checks, rounds, cases = Checks(), 1 if options.quick else options.rounds, 1 if options.quick else None
    rows = attention_rows(rounds, checks, cases) + linear_rows(rounds, checks, cases)
    checks.require()
    bandwidth.append(read_bandwidth())
    result = {
        "threads": torch.get_num_threads(),
        "attention_backend": "cpp" if found else "torch",
        "why": why,
        "read_bandwidth_gb_per_s": [round(b, 1) for b in bandwidth],  # before and after
        "rows": rows,
    }
    if options.json:
        print(json.dumps({"benchmark": "kernels", **result}))
        return 0
    print(f"{result['threads']} threads; attention: {result['attention_backend']} ({why})")
    print(f"read bandwidth before/after: {result['read_bandwidth_gb_per_s']} GB/s")
    for r in rows:
        times = "  ".join(f"{k} {v:.1f} us" for k, v in r["microseconds"].items())
        print(f"{r['name']:<42} {r['ratio']:>6.2f}x {r['peer']:<7} {r['read_gb_per_s']:>6.1f} GB/s   {times}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
