"""``python -m benchmarks sums``: what it takes ranks of one machine to add up their parts, in memory that they share
and by gloo's sockets, by turns in the same processes; and beside that an RMS norm of the same rows, which could be
taken into the pass that adds up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

# Rows and columns: an answer's token, eight answers of a small and of a large model, and pieces of prompts.
SHAPES = ((1, 512), (8, 512), (8, 4096), (64, 4096), (512, 4096))
SECONDS = 0.4


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks sums", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (args.ranks, f"{folder}/meeting", args.rounds, args.dtype, found)
        ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(args.ranks)]
        for process in ranks:
            process.start()
        lines = found.get()
        for process in ranks:
            process.join()
    result = {"ranks": args.ranks, "dtype": args.dtype, "rounds": args.rounds, "sums": lines}
    if not args.json:
        print("microseconds, medians of rounds; behind each the processor's own")
        for line in lines:
            print(
                f"{line['rows']:>4} x {line['columns']:<5} memory {line['memory_us']:>8} ({line['memory_cpu_us']})"
                f"  sockets {line['sockets_us']:>8} ({line['sockets_cpu_us']})  norm {line['norm_us']}"
            )
    print(json.dumps(result))


def _rank(rank: int, ranks: int, file: str, rounds: int, dtype: str, found: Any) -> None:
    import torch
    import torch.distributed as dist

    from serve_app.kernels.library import native
    from serve_app.kernels.library.load import cpu_library
    from serve_app.parallel.life import Waiting
    from serve_app.parallel.meeting import Meeting, join, leave
    from serve_app.parallel.place import Place

    torch.set_num_threads(1)

    def agree(ok: bool) -> bool:
        said = torch.tensor([int(ok)])
        dist.all_reduce(said, op=dist.ReduceOp.MIN)
        return bool(said)

    meeting = Meeting("127.0.0.1", file=file)
    group = join(Place(ranks, 1, rank), torch.device("cpu"), meeting, "sums", waiting=Waiting(), agree=agree)
    memory = group._shared
    if memory is None:
        raise SystemExit("ranks can't share memory here: there is no C++ compiler, or processes may not see each other")
    lines = []
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns).to(getattr(torch, dtype))
        weight, library = torch.ones(columns), cpu_library()
        assert library is not None
        times: dict[str, list[tuple[float, float]]] = {"memory": [], "sockets": []}
        for _ in range(rounds):
            for way, shared in (("memory", memory), ("sockets", None)):
                group._shared = shared
                times[way].append(_timed(lambda x=x: group.sum(x), agree))  # type: ignore[misc]
        group._shared = memory
        norm = _timed(lambda x=x, w=weight, by=library: native.rms_norm(by, x, w, 1e-6, False), agree)  # type: ignore[misc]
        line: dict[str, Any] = {"rows": rows, "columns": columns, "norm_us": round(norm[0] * 1e6, 1)}
        for way, each in times.items():
            wall, busy = (statistics.median(column) * 1e6 for column in zip(*each, strict=True))
            line |= {f"{way}_us": round(wall, 1), f"{way}_cpu_us": round(busy, 1)}
        lines.append(line)
    if not rank:
        found.put(lines)
    leave()


def _timed(call: Callable[[], object], agree: Callable[[bool], bool]) -> tuple[float, float]:
    """Seconds of a call, and of its processor, over as many as all ranks make."""
    for _ in range(3):
        call()
    calls = 0
    began, busy = time.perf_counter(), time.thread_time()
    while True:
        for _ in range(10):
            call()
        calls += 10
        wall, own = time.perf_counter() - began, time.thread_time() - busy
        # All go on or none; what that takes is not counted.
        asked, asked_busy = time.perf_counter(), time.thread_time()
        if not agree(wall < SECONDS):
            return wall / calls, own / calls
        began += time.perf_counter() - asked
        busy += time.thread_time() - asked_busy
