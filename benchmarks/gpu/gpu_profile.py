"""Where a step's time goes on a GPU: kernels, the host beside them, and the matrix products by themselves.

    python -m benchmarks gpu_profile [--shapes llama-8b] [--json]

Each case is a batch that stays as it is for some steps of the engine, graphs and overlap included. ``wall`` is the
time of a step, ``device`` what its kernels take together, ``host`` the time outside of waiting for the device. The
kernels of a case come with their launches and milliseconds a step; ``host`` functions are those of the largest case, by
cProfile. ``linears``: the products of one layer and of the head, by torch and by the tiles for few rows, each over
copies of its weights that no cache holds, replayed from a graph. Checkpoints are those of ``benchmarks gpu``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import shapes
from benchmarks.gpu.sides import Ours, machine, prompts, seconds, synchronize

# name: requests, tokens behind which they decode
DECODES = {"1 decode": (1, 128), "16 decodes": (16, 500), "64 decodes": (64, 500), "256 decodes": (256, 500)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
STEPS = 12
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")


def fill(side: Ours, lengths: list[int], new: int, seed: int) -> None:
    """Requests of these prompt lengths, all of them in the engine, none computed yet."""
    from serve_app.engine.request import Request
    from serve_app.sampling_params import SamplingParams

    side.engine.scheduler.forget_cache()
    for prompt in prompts(lengths, side.vocab, seed):
        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        side.engine.add(Request(str(side.count), prompt, len(prompt), sampling, root=b"profile"))
        side.count += 1


def decoding(side: Ours, count: int, length: int, new: int) -> None:
    """``count`` requests that have their first tokens."""
    fill(side, [length] * count, new, side.count)
    first: set[str] = set()
    while len(first) < count:
        first |= {output.request_id for output in side.engine.step()}
    for _ in range(3):
        side.engine.step()


def drain(side: Ours) -> None:
    while side.engine.has_work:
        side.engine.step()


def profiled(side: Ours, steps: int, before: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """``steps`` of the engine as it stands, each behind ``before``: the wall clock without a profiler, kernels with
    one.
    """
    synchronize(side.device)
    started = time.perf_counter()
    for _ in range(steps):
        before()
        side.engine.step()
    synchronize(side.device)
    found: dict[str, Any] = {"wall_ms": 1e3 * (time.perf_counter() - started) / steps}
    if side.device != "cuda":
        return found
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        started = time.perf_counter()
        for _ in range(steps):
            before()
            side.engine.step()
        taken = time.perf_counter() - started
        synchronize(side.device)
    kernels: dict[str, list[float]] = {}
    waited = 0.0
    for event in profile.key_averages():
        if event.key in WAITS:
            waited += event.self_cpu_time_total
        elif event.device_type == torch.autograd.DeviceType.CUDA:
            entry = kernels.setdefault(event.key[:90], [0.0, 0])
            entry[0] += event.self_device_time_total
            entry[1] += event.count
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    found["device_ms"] = sum(taken for _, (taken, _) in ordered) / steps / 1e3
    found["host_ms"] = (1e3 * taken - waited / 1e3) / steps
    found["kernels"] = [
        {"name": name, "ms": us / steps / 1e3, "launches": count / steps} for name, (us, count) in ordered[:14]
    ]
    return found


def host(side: Ours, steps: int) -> list[dict[str, Any]]:
    """The functions that take most of the host's time over ``steps``, without what they call."""
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(steps):
        side.engine.step()
    watch.disable()
    entries = [
        {"function": f"{Path(file).name}:{line} {name}", "ms": 1e3 * own / steps, "calls": calls / steps}
        for (file, line, name), (_, calls, own, _, _) in pstats.Stats(watch).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(entries, key=lambda entry: -entry["ms"])[:25]


def steps_of(side: Ours, decodes: dict[str, tuple[int, int]], prefill: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (count, length) in decodes.items():
        decoding(side, count, length, 4 * STEPS + 8)
        found[name] = profiled(side, STEPS)
        drain(side)
    largest, (count, length) = list(decodes.items())[-1]
    decoding(side, count, length, 3 * STEPS + 8)
    found[largest]["host"] = host(side, STEPS)
    drain(side)
    name = f"{max(1, count - 6)} decodes, and a new prompt of {length // 2} in each step"
    decoding(side, max(1, count - 6), length, 8 * STEPS + 8)
    for _ in range(2):  # kernels are compiled in the first
        found[name] = profiled(side, STEPS, lambda: fill(side, [length // 2], 1, side.count))
    drain(side)
    name = f"prompts of {prefill}, whole batches"
    for _ in range(2):  # kernels are compiled in the first
        fill(side, [prefill] * 24, 1, side.count)
        side.engine.step()
        found[name] = profiled(side, 2)
        drain(side)
    return found


def replayed(run: Callable[[], None], device: str) -> float:
    """Median seconds of a graph's replays; on a CPU of calls."""
    if device != "cuda":
        return seconds(run, device, 5)
    from serve_app.kernels.gpu import few_rows

    return few_rows.replayed(run)


def products(weights: Tensor, device: str) -> dict[int, float]:
    """Seconds of one product with ``weights`` [copies, n, k], by rows."""
    found = {}
    for rows in ROWS if device == "cuda" else ROWS[:2]:
        x = torch.randn(rows, weights.shape[2], device=device).to(weights.dtype)

        def run(x: Tensor = x) -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        found[rows] = replayed(run, device) / len(weights)
    return found


def tiles_of(weights: Tensor, device: str) -> dict[int, dict[str, float]]:
    """Microseconds of one product by each tile for few rows that runs here, by rows."""
    if device != "cuda":
        return {}
    from serve_app.kernels.gpu.few_rows import TILES, multiply

    found: dict[int, dict[str, float]] = {}
    for rows, tiles in TILES.items():
        x = torch.randn(rows, weights.shape[2], device=device).to(weights.dtype)
        for tile in tiles:

            def run(tile: Any = tile, x: Tensor = x) -> None:
                for weight in weights:
                    multiply(x, weight, None, tile)

            if not tile.fits(weights[0]):
                continue
            try:
                taken = replayed(run, device) / len(weights)
            except Exception as failure:  # no room in shared memory
                print(f"{tile}: {failure}")
                continue
            found.setdefault(rows, {})[f"{tile.n} x {tile.k}, {tile.warps}, {tile.stages}"] = 1e6 * taken
    return found


def linears(path: Path, device: str) -> dict[str, Any]:
    """Each product of a layer and the head, alone."""
    config = json.loads((path / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    sizes = {
        "qkv": (dim * (heads + 2 * config["num_key_value_heads"]), hidden), "o": (hidden, dim * heads),
        "gate_up": (2 * inner, hidden), "down": (hidden, inner), "head": (config["vocab_size"], hidden),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, (n, k) in sizes.items():
        copies = max(2, -(-400_000_000 // (2 * n * k))) if device == "cuda" else 2
        weights = torch.randn(copies, n, k, device=device, dtype=torch.bfloat16)
        taken = products(weights, device)
        tiles = tiles_of(weights, device)
        found[name] = {
            "n": n, "k": k, "us": {rows: 1e6 * s for rows, s in taken.items()},
            "gb_s": {rows: 2e-9 * n * k / s for rows, s in taken.items()},
            "tflops": {rows: 2e-12 * n * k * rows / s for rows, s in taken.items()}, "tiles": tiles,
        }  # fmt: skip
        del weights
    return found


def show(name: str, result: dict[str, Any]) -> None:
    print(f"# {name}")
    for case, found in result["steps"].items():
        times = " ".join(f"{key[:-3]} {value:.2f} ms" for key, value in found.items() if key.endswith("_ms"))
        print(f"\n{case}: {times}")
        for kernel in found.get("kernels", []):
            print(f"  {kernel['ms']:8.3f} ms {kernel['launches']:7.1f} x {kernel['name']}")
        for entry in found.get("host", []):
            print(f"  {entry['ms']:8.3f} ms {entry['calls']:7.1f} x {entry['function']}")
    for layer, found in result["linears"].items():
        rates = "  ".join(f"{rows}: {us:.0f} us {found['gb_s'][rows]:.0f} GB/s" for rows, us in found["us"].items())
        print(f"\n{layer} [{found['n']}, {found['k']}]  {rates}")
        for rows, tiles in found["tiles"].items():
            print(f"  {rows} rows: " + "  ".join(f"[{tile}] {us:.0f} us" for tile, us in tiles.items()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", default="llama-8b")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "serve-app-gpu", help="checkpoints")
    parser.add_argument("--quantization", default="none", help="none or fp8")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args(argv)
    small = options.device == "cpu"
    amount: dict[str, Any] = {"context": 4096, "batch_tokens": 8192, "seqs": 256}
    amount["load"] = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    if small:
        amount |= {"context": 512, "batch_tokens": 128, "seqs": 8}
    decodes = {"1 decode": (1, 20), "4 decodes": (4, 20)} if small else DECODES
    result: dict[str, Any] = {"benchmark": "gpu_profile", "machine": machine(options.device, options.work, {})}
    for name in options.shapes.split(","):
        path = shapes.write(name, options.work, options.device)
        side = Ours(options.device, path, amount)
        while side.engine.runner.prepare():
            pass
        with torch.inference_mode():
            found = {"steps": steps_of(side, decodes, 64 if small else 2048)}
        del side
        if not small:
            torch.cuda.empty_cache()
        found["linears"] = linears(path, options.device)
        result[name] = found
        show(name, found)
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
