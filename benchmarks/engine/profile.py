"""Where a step's time goes, part by part; reached by ``python -m benchmarks engine MODEL_DIR --profile``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.workloads import NEW, PROMPT, prompts

CALLS = ("schedule", "batch build", "forward", "sampling", "commit and hash")


def profile(model_dir: Path, batches: list[int], threads: int) -> dict[str, Any]:
    """Microseconds per decode step and per prefill of each part, printed and returned by batch size."""
    import torch

    from benchmarks.engine.sides import Ours

    torch.set_num_threads(threads)
    ours = Ours(str(model_dir))
    found: dict[str, Any] = {"model": model_dir.name, "threads": threads, "report": ours.model.report}
    for batch in batches:
        run(ours, batch, f"warm{batch}")
        found[f"batch {batch}"] = parts = run(ours, batch, f"measured{batch}")
        for kind, times in parts.items():
            total = times["step"]
            print(f"batch {batch} {kind}: step {total:.0f} us")
            for name, value in times.items():
                print(f"    {name:24} {value:10.1f} us  {100 * value / total:5.1f} %")
    return found


def run(ours: Any, batch: int, salt: str) -> dict[str, dict[str, float]]:
    """One run of ``batch`` requests with timers around the engine's calls; mean microseconds per step."""
    from serve_app.engine import runner as module
    from serve_app.engine.request import Request
    from serve_app.kernels.decoder import PARTS
    from serve_app.sampling_params import SamplingParams

    engine, spent = ours.engine, defaultdict(float)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            spent[name] += time.perf_counter() - started
            return result

        return wrapper

    decoder = ours.model.forward
    times = np.zeros(len(PARTS), np.int64)
    if hasattr(decoder, "times"):
        decoder.times = times
    saved = (engine.scheduler.next, engine.scheduler.commit, engine.runner.forward, module.build_batch, module.sample)
    engine.scheduler.next = timed("schedule", saved[0])
    engine.scheduler.commit = timed("commit and hash", saved[1])
    engine.runner.forward = timed("forward", saved[2])
    module.build_batch = timed("batch build", saved[3])
    module.sample = timed("sampling", saved[4])
    result: dict[str, dict[str, float]] = {}
    try:
        for index, prompt in enumerate(prompts([PROMPT] * batch)):
            sampling = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
            engine.add(Request(str(index), prompt, len(prompt), sampling, root=salt.encode()))
        for kind in ("prefill", "decode"):
            spent.clear()
            times[:] = 0
            steps, started = 0, time.perf_counter()
            while engine.has_work and (kind == "decode" or _prefilling(engine)):
                engine.step()
                steps += 1
            whole = time.perf_counter() - started
            named = {name: spent[name] for name in CALLS}
            named["other"] = whole - sum(named.values())
            inner = {f"  {name}": value / 1e9 for name, value in zip(PARTS, times.tolist(), strict=True)}
            result[kind] = {"step": whole, **named, **(inner if times.any() else {})}
            result[kind] = {name: 1e6 * value / max(steps, 1) for name, value in result[kind].items()}
    finally:
        del engine.scheduler.next, engine.scheduler.commit
        engine.runner.forward, module.build_batch, module.sample = saved[2], saved[3], saved[4]
        if hasattr(decoder, "times"):
            decoder.times = None
    return result


def _prefilling(engine: Any) -> bool:
    return any(r.output_len == 0 for r in [*engine.scheduler.running, *engine.scheduler.waiting])
