"""Even traffic over many adapters by a worker's own way from files to places, beside the same traffic without adapters:
``python -P even.py MODEL_DIR FILES REQUESTS CLIENTS NEW CACHE_BYTES``; one JSON object on the last line.

Every request has the next one of the adapters, so that as many others come between two of one as there are: whatever
the host's memory holds of them, the one used least recently is the one that is wanted next.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

PLACES = 32
PROMPT = 32


class Worker:
    """An engine's thread and its adapters, without a server around them."""

    def __init__(self, model_dir: str, files: str, cache_bytes: int) -> None:
        from serve_app.engine.build import EngineLimits, build_engine
        from serve_app.engine.loop import EngineLoop
        from serve_app.models.load import load_causal_lm
        from serve_app.state.blobs.files import open_files
        from serve_app.worker.adapter_files import load_adapter
        from serve_app.worker.adapters import Adapters
        from serve_app.worker.birth import SWITCH_S
        from serve_app.worker.packed_files import PackedFiles

        sys.setswitchinterval(SWITCH_S)  # as in a worker
        model = load_causal_lm(Path(model_dir), adapters=PLACES)
        assert model.adapters is not None
        limits = EngineLimits(max_batch_tokens=2048, max_num_seqs=PLACES, max_model_len=1024)
        self.loop = asyncio.get_running_loop()
        self.ends: dict[str, asyncio.Future[int]] = {}
        self.tokens: dict[str, int] = {}
        self.engine = EngineLoop(build_engine(model, limits), self._outputs)
        self.packed = PackedFiles(Path(files) / "packed", model.adapters, 64 << 30) if model.adapters.form else None
        load = partial(load_adapter, open_files(files), model.adapters, self.packed)
        self.adapters = Adapters(
            model.adapters, load, lambda do: self.engine.call(lambda engine: do()), self._lost, cache_bytes=cache_bytes
        )

    def _lost(self, request: str, why: str) -> None:
        raise RuntimeError(why)

    def _outputs(self, outputs: list[Any]) -> None:
        self.loop.call_soon_threadsafe(self._take, outputs)

    def _take(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.tokens[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                self.ends.pop(output.request_id).set_result(self.tokens.pop(output.request_id))

    async def run(self, name: str, prompt: list[int], new: int, at: Any) -> int:
        from serve_app.engine.request import Request
        from serve_app.sampling_params import SamplingParams

        sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        request = Request(name, prompt, len(prompt), sampling, name.encode())
        ended = self.ends[name] = self.loop.create_future()
        self.tokens[name] = 0
        if at is not None:
            request.adapter = await self.adapters.place(name, at, ended)
        self.engine.add(request)
        made = await ended
        self.adapters.release(name)
        return made


async def traffic(worker: Worker, label: str, count: int, clients: int, new: int, adapters: list[Any]) -> float:
    """Tokens per second of ``count`` requests by so many clients, each of which asks again when it is answered."""
    numbers = iter(range(count))
    made = 0

    async def client() -> None:
        nonlocal made
        for number in numbers:
            prompt = [(7 * number + 13 * column) % 8000 + 10 for column in range(PROMPT)]
            at = adapters[number % len(adapters)] if adapters else None
            tokens = await worker.run(f"{label}-{number}", prompt, new, at)
            made += tokens

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    if made != count * new:
        raise SystemExit(f"no figures: {made} tokens of {count * new}")
    return made / seconds


async def measure(model_dir: str, files: str, count: int, clients: int, new: int, cache_bytes: int) -> dict[str, Any]:
    from serve_app.wire.generate import AdapterAt

    worker = Worker(model_dir, files, cache_bytes)
    known = [AdapterAt(digest, size) for digest, size in json.loads((Path(files) / "known.json").read_text())]
    await traffic(worker, "warm", 2 * PLACES, clients, new, [])
    # First each is packed, later it is read as it was packed. Those of "placed" all have a place: what they cost is
    # what steps with different adapters do.
    rates: dict[str, list[float]] = {"base": [], "first": [], "again": [], "placed": []}
    for number, turn in enumerate(["base", "first", "base", "again", "base", "placed", "base"]):
        at = {"base": [], "placed": known[:PLACES]}.get(turn, known)
        asked = len(known) if turn in ("first", "again") else count
        rates[turn].append(await traffic(worker, f"{turn}{number}", asked, clients, new, at))
    base = statistics.median(rates["base"])
    stats = worker.adapters.stats()
    loads = sorted(fetch.seconds for fetch in worker.adapters.loads)
    worker.engine.stop()
    worker.adapters.close()
    return {
        "adapters": len(known), "adapter_mb": known[0].size / 1e6, "tokens_per_s": rates,
        "share_of_base": {name: rates[name][0] / base for name in ("first", "again", "placed")},
        "cache_mb": cache_bytes / 1e6, "held_mb": stats["bytes"] / 1e6, "loaded": stats["loaded"],
        "load_ms": 1e3 * loads[len(loads) // 2], "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


if __name__ == "__main__":
    model_dir, files, *numbers = sys.argv[1:]
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    wire.write(json.dumps(asyncio.run(measure(model_dir, files, *(int(number) for number in numbers)))) + "\n")
    wire.flush()
    os._exit(0)  # what is still being written to the disk is not waited for
