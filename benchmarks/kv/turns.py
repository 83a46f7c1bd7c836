"""The second turn of a conversation on another worker, beside the same prompt cold; and what a hand-over costs.

``python -m benchmarks turns [--context 4096] [--rounds 5] [--size 7m] [--threads 1] [--tensor 1] [--json]``. Starts a
small private Ray with the product's own workers and pool, without Serve and HTTP: two decode workers and a prefill
worker of a random model. Each round, in alternating order, takes the time to the first token on the reader's side of

* ``cold``: a prompt of ``context`` tokens that nobody has seen, computed by the decode worker it came to;
* ``turn``: the same conversation's next turn (the answer and 64 new tokens behind it) on the *other* decode worker;
* ``handed over``: such a cold prompt computed by the prefill worker while decode takes the chunks over.

``--tensor``: workers of so many ranks. ``rank_seconds`` are those of its processor that each rank of the reader takes
for a turn, rank 0 first, as the kernel counts them; other work on the machine hardly changes them.

Workers that wait for nothing still share the cores: figures count only where other processes were quiet. Every answer
must have as many tokens as were asked for; a turn must find its conversation in the pool, and a hand-over move it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.checks import Checks
from benchmarks.serving.stack import private_ray
from serve_app.channel.inbox import Stream
from serve_app.sampling_params import SamplingParams
from serve_app.tasks.work import WorkerGone
from serve_app.wire.generate import ArrivingCall, GenerateCall, Generated, Missing, PrefillCall, PrefillDone, Prefilled

ANSWER, NEW = 96, 64
SALT = b"benchmark's salt"


async def whole(stream: Stream, answer: Awaitable[Any]) -> Generated:
    """The worker's result. What the channel has not delivered comes with it; a stream that nothing else will end ends
    with it too. Raises WorkerGone where the answer is not whole, as the stream does then.
    """
    try:
        result = await answer
        if not isinstance(result, Generated):
            raise WorkerGone(f"no answer: {result}")
        for item in result.undelivered:
            stream.feed(item)
        if not stream.finished:
            raise WorkerGone(f"an answer without its end, which has {stream.next_offset} tokens")
    except Exception as error:
        stream.fail(error)
        raise
    return result


class TimedClient:
    """A gateway's part: sends requests to workers and times their first tokens."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self._count = 0
        self.checks = Checks()

    def call(self, ids: list[int], new: int) -> GenerateCall:
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return GenerateCall(
            f"turn-{self._count}", np.array(ids, np.int32).tobytes(), SALT, sampling, self._inbox.address
        )

    async def ask(self, worker: Any, ids: list[int], new: int) -> tuple[float, list[int], Generated]:
        """(seconds to the first token, tokens, the worker's result)"""
        asked = self.call(ids, new)
        return await self._follow(asked, worker.generate(asked))

    async def ask_both(
        self, decode: Any, prefill: Any, ids: list[int], new: int = 1
    ) -> tuple[float, list[int], Generated]:
        """The same with the prompt computed by ``prefill``, as a decode replica has it done."""
        asked = replace(self.call(ids, new), prefill_above=1)
        started = time.perf_counter()
        missing = await decode.generate(asked)
        assert isinstance(missing, Missing), missing
        left = time.perf_counter() - started
        running = asyncio.ensure_future(self._follow(asked, decode.arriving(ArrivingCall(asked.id))))
        done = await prefill.prefill(PrefillCall(f"{asked.id}-prefill", asked.ids[:-4], SALT))
        assert isinstance(done, PrefillDone), done
        await decode.prefilled(Prefilled(asked.id, done.cached, done.node))
        first, tokens, result = await running
        return left + first, tokens, result

    async def _follow(self, asked: GenerateCall, answer: Awaitable[Any]) -> tuple[float, list[int], Generated]:
        stream = self._inbox.open_stream(asked.id, 0)
        started, first = time.perf_counter(), 0.0
        call = asyncio.ensure_future(whole(stream, answer))
        tokens: list[int] = []
        try:
            async for item in stream:
                first = first or time.perf_counter() - started
                tokens += item.ids
        finally:
            await asyncio.gather(call, return_exceptions=True)
        result = call.result()
        if result.finish != "length" or len(tokens) != asked.sampling.max_tokens:
            self.checks.add("an answer", f"{len(tokens)} tokens, {result.finish}")
        else:
            self.checks.right += 1
        return first, tokens, result


async def measure(arguments: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    import ray

    from deployments.worker import EngineWorker, WorkerHandle
    from serve_app.channel.inbox import TokenInbox
    from serve_app.kv.keys import CHUNK_TOKENS
    from serve_app.ray_private.fork_server import forked
    from serve_app.worker.spec import WorkerSpec

    def start(stage: str) -> Any:
        return WorkerHandle(EngineWorker.options(**forked(with_torch=True)).remote(  # type: ignore[attr-defined]
            WorkerSpec(
                model="benchmark", stage=stage, weights={"path": str(checkpoint)}, source=str(checkpoint),
                home=str(checkpoint.parent), dtype="bfloat16", cpu_threads=arguments.threads, max_model_len=8192,
                kv_cache_bytes=512 << 20, max_batch_tokens=1024, max_num_seqs=8, publish=True,
                tensor_parallel=arguments.tensor,
            )
        ))  # fmt: skip

    one, two, prefill = start("decode"), start("decode"), start("prefill")
    for worker in (one, two, prefill):
        await worker.ready()
    inbox = TokenInbox()
    await inbox.start()
    reader, rng = TimedClient(inbox), np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"cold": [], "turn": [], "handed_over": []}
    paths: dict[str, dict[str, Any]] = {}
    shares: list[float] = []
    rank_seconds: list[list[float]] = []

    def fresh(count: int) -> list[int]:
        return rng.integers(10, 8000, count).tolist()

    async def conversation(first: Any, second: Any) -> None:
        prompt = fresh(arguments.context)
        cold, answer, _ = await reader.ask(first, prompt, ANSWER)
        await settled(first)
        began = await processors(second)
        turn, _, result = await reader.ask(second, prompt + answer + fresh(NEW), 1)
        ended = await processors(second)
        rank_seconds.append([after - before for before, after in zip(began, ended, strict=True)])
        seconds["cold"].append(cold)
        seconds["turn"].append(turn)
        paths["turn"] = result.path.shown()
        shared = arguments.context // CHUNK_TOKENS * CHUNK_TOKENS
        held = result.path.node >= shared
        reader.checks.that("a turn", held, f"{result.path.node} tokens from the pool instead of {shared}")

    async def handed_over(decode: Any) -> None:
        taken, _, result = await reader.ask_both(decode, prefill, fresh(arguments.context))
        seconds["handed_over"].append(taken)
        paths["handed_over"] = result.path.shown()
        shares.append(result.path.handover_share)
        moved = result.path.bytes > 0
        reader.checks.that("a hand-over", moved, "nothing of the prompt came from where it was computed")

    for number in range(arguments.rounds + 1):  # the first one warms up
        first, second = (one, two) if number % 2 else (two, one)
        if number % 2:
            await conversation(first, second)
            await handed_over(first)
        else:
            await handed_over(second)
            await conversation(first, second)
    stats = (await one.stats()).numbers
    await inbox.aclose()
    for worker in (one, two, prefill):
        ray.kill(worker.actor)
    reader.checks.require()
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "ttft_ms": {name: round(1e3 * value, 2) for name, value in median.items()},
        "turn_over_cold": round(median["turn"] / median["cold"], 4),
        "handover_share_of_ttft": round(statistics.median(shares[1:]), 4),
        "rank_seconds": [round(statistics.median(of_one), 3) for of_one in zip(*rank_seconds[1:], strict=True)],
        "paths": paths,
        "rounds_ms": {name: [round(1e3 * v, 1) for v in values[1:]] for name, values in seconds.items()},
        "costs": stats["pool"]["costs"],
    }


async def processors(worker: Any) -> list[float]:
    """Seconds of a processor that each rank of a worker has taken."""
    told = await worker.stats()
    ranks = [each["pid"] for each in told.numbers["ranks"] or ()]
    return [cpu_seconds(pid) for pid in ranks or [told.pid]]


def cpu_seconds(pid: int) -> float:
    """Of a process, its threads together; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def settled(worker: Any) -> None:
    """Waits until what a worker has published is in the pool: between two turns a person reads."""
    before = -1
    while (now := (await worker.stats()).numbers["pool"]["published"]) != before:
        before = now
        await asyncio.sleep(0.3)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens of the conversation's first prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="7m", help="of the random model: see benchmarks checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of each worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    with private_ray(arguments.size) as checkpoint:
        found = asyncio.run(measure(arguments, checkpoint))
    for name, value in found["ttft_ms"].items():
        print(f"time to first token, {name:12} {value:9.1f} ms")
    turn, handed = found["paths"]["turn"], found["paths"]["handed_over"]
    print(f"a turn costs {100 * found['turn_over_cold']:.1f} % of a cold prompt ({turn['node']} tokens from the pool, "
          f"{turn['bytes'] / 1e6:.1f} MB, {turn['computed']} computed)")  # fmt: skip
    print(f"a hand-over is {100 * found['handover_share_of_ttft']:.1f} % of the time to first token "
          f"({handed['early_bytes'] / 1e6:.1f} of {handed['bytes'] / 1e6:.1f} MB moved while it computed)")  # fmt: skip
    print(f"of its own processor each rank of the reader takes {found['rank_seconds']} s for a turn")
    if arguments.json:
        about = {"context": arguments.context, "size": arguments.size, "tensor": arguments.tensor}
        print(json.dumps({"benchmark": "turns", **about, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
