"""What long prompts do to streams that run: workers that do both, beside one that prefills and one that decodes.

``python -m benchmarks interference [--streams 16] [--prompt 1024] [--under-way 2 | --load 0.7] [--json]``. Starts a
small private Ray with the product's own workers and pool, without Serve and HTTP, and a random model. Two workers of
one thread each have the same work in each of three set-ups, which take turns:

* ``mixed``: half of the streams and every other prompt on each worker, a prompt in one step (no chunking);
* ``chunked``: the same with 256 prompt tokens a step;
* ``disaggregated``: prompts on one worker, handed over as the product does it, streams on the other.

``--under-way`` clients each send the next prompt when they have the first token of the one before, as somebody does who
works through a pile of documents; with ``--load`` prompts arrive at fixed times instead, as often as keeps one worker
busy for that share of its time. How many prompts got their first token is told beside the gaps: two workers that both
prefill do more of them than one. Gaps between the tokens of the streams are taken where a gateway would be. ``itl`` is
over all of them: its percentiles see prompts only where many steps have some. ``stall`` is over streams and prompts: a
stream's longest gap while a prompt waits for its first token. What else runs on the machine hits all three, but not
alike: figures count where other processes were quiet. Every prompt's answer must be complete, every
stream without a gap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kv.turns import TimedClient, whole
from benchmarks.serving.stack import private_ray
from benchmarks.trace.measure import quantile

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CHUNK = 256
ANSWER = 4  # tokens of each long prompt's answer
CONTEXT = 1024  # tokens of each stream's prompt


class Clients(TimedClient):
    """Streams whose gaps are written down, and long prompts."""

    async def stream(self, worker: Any, ids: list[int], until: float) -> list[tuple[float, float]]:
        """(when a token came, seconds since the one before) of one answer that is cut short at ``until``."""
        asked = self.call(ids, 6000)
        stream = self._inbox.open_stream(asked.id, 0)
        call = asyncio.ensure_future(whole(stream, worker.generate(asked)))
        gaps, last, position = [], 0.0, 0
        try:
            async for item in stream:
                now = time.perf_counter()
                self.checks.equal("place of a token in its stream", item.offset, position)
                position = item.end
                if last and item.ids:
                    gaps += [(now, (now - last) / len(item.ids))] * len(item.ids)
                last = now
                if now > until and gaps:  # on a busy machine the first may come late
                    break
        finally:
            stream.close()
            await worker.abort(asked.id)
            await asyncio.gather(call, return_exceptions=True)
        return gaps

    async def prompt(self, decode: Any, prefill: Any | None, ids: list[int]) -> tuple[float, float]:
        """(when it was sent, seconds to the first token) of a long prompt, computed by ``prefill`` if there is one."""
        sent = time.perf_counter()
        if prefill is None:
            return sent, (await self.ask(decode, ids, ANSWER))[0]
        return sent, (await self.ask_both(decode, prefill, ids, ANSWER))[0]


async def side(
    clients: Clients, homes: list[tuple[Any, Any | None]], streams: list[Any], rng: Any, seconds: float, prompt: int,
    period: float | None, under_way: int,
) -> dict[str, float]:  # fmt: skip
    """``homes``: (decode, prefill) of the prompts in turn; ``streams``: the worker of each stream. Prompts come every
    ``period`` seconds, or without one when those before are done, ``under_way`` at a time.
    """
    begin = time.perf_counter() + 0.5  # until all streams run
    until = begin + seconds

    def fresh(count: int) -> list[int]:
        return rng.integers(10, 8000, count).tolist()

    async def arrive(number: int) -> tuple[float, float]:
        await asyncio.sleep(max(0.0, begin + number * period - time.perf_counter()))
        return await clients.prompt(*homes[number % len(homes)], fresh(prompt))

    async def one_by_one(client: int) -> list[tuple[float, float]]:
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        done: list[tuple[float, float]] = []
        while not done or time.perf_counter() < until:
            done.append(await clients.prompt(*homes[client % len(homes)], fresh(prompt)))
        return done

    running = [asyncio.ensure_future(clients.stream(w, fresh(CONTEXT), until)) for w in streams]
    if period is None:
        piles = await asyncio.gather(*(one_by_one(n) for n in range(under_way)))
        prompts = [done for pile in piles for done in pile]
    else:
        prompts = await asyncio.gather(*(arrive(n) for n in range(max(1, int(seconds / period)))))
    told = await asyncio.gather(*running)
    gaps = [gap for one in told for at, gap in one if at >= begin]
    stalls = [
        max((gap for at, gap in one if at > sent and at - gap < sent + first), default=first)
        for sent, first in prompts
        for one in told
    ]
    return {
        **{f"itl_{name}_ms": 1e3 * quantile(gaps, q) for name, q in QUANTILES.items()},
        **{f"stall_{name}_ms": 1e3 * quantile(stalls, q) for name, q in QUANTILES.items()},
        "tokens_per_s": len(gaps) / seconds,
        "prompts_per_s": sum(sent + first <= until for sent, first in prompts) / seconds,
        "prompt_ttft_p50_ms": 1e3 * statistics.median(first for _, first in prompts),
    }


async def measure(arguments: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    import ray

    from deployments.worker import EngineWorker, WorkerHandle
    from serve_app.channel.inbox import TokenInbox
    from serve_app.ray_private.fork_server import forked
    from serve_app.worker.spec import WorkerSpec

    def start(stage: str, max_batch_tokens: int) -> Any:
        return WorkerHandle(EngineWorker.options(**forked(with_torch=True)).remote(  # type: ignore[attr-defined]
            WorkerSpec(
                model="benchmark", stage=stage, weights={"path": str(checkpoint)}, source=str(checkpoint),
                home=str(checkpoint.parent), dtype="bfloat16", cpu_threads=1, max_model_len=8192,
                kv_cache_bytes=256 << 20, max_batch_tokens=max_batch_tokens, max_num_seqs=64, publish=True,
            )
        ))  # fmt: skip

    whole = arguments.prompt + 64
    others: dict[str, list[Any]] = {
        name: [start("decode", step), start("decode", step)]
        for name, step in (("mixed", whole), ("chunked", CHUNK))
        if name in arguments.beside.split(",")
    }
    decode, prefill = start("decode", CHUNK), start("prefill", whole)
    workers = [*(worker for pair in others.values() for worker in pair), decode, prefill]
    for worker in workers:
        await worker.ready()
    inbox = TokenInbox()
    await inbox.start()
    clients, rng = Clients(inbox), np.random.default_rng(0)
    alone = [
        (await clients.prompt(decode, prefill, rng.integers(10, 8000, arguments.prompt).tolist()))[1] for _ in range(4)
    ]
    for worker in workers[:-2]:
        await clients.prompt(worker, None, rng.integers(10, 8000, arguments.prompt).tolist())
    period = statistics.median(alone[1:]) / arguments.load if arguments.load else None
    n = arguments.streams
    sides: dict[str, tuple[list[tuple[Any, Any | None]], list[Any]]] = {
        **{name: ([(w, None) for w in pair], [pair[i % 2] for i in range(n)]) for name, pair in others.items()},
        "disaggregated": ([(decode, prefill)], [decode] * n),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            homes, streams = sides[name]
            rounds[name].append(
                await side(
                    clients, homes, streams, rng, arguments.seconds, arguments.prompt, period, arguments.under_way
                )
            )
    await inbox.aclose()
    for worker in workers:
        ray.kill(worker.actor)
    clients.checks.require()
    figures = {
        name: {key: round(statistics.median(r[key] for r in rows), 2) for key in rows[0]}
        for name, rows in rounds.items()
    }
    best = rounds["disaggregated"]
    ratios = {
        f"{metric}_p90": {
            name: round(statistics.median(a[key] / b[key] for a, b in zip(rounds[name], best, strict=True)), 2)
            for name in others
        }
        for metric, key in (("itl", "itl_p90_ms"), ("stall", "stall_p90_ms"))
    }
    return {
        "prompt_alone_ms": round(1e3 * statistics.median(alone[1:]), 1),
        "sides": figures,
        "over_disaggregated": ratios,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks interference", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each long prompt")
    parser.add_argument("--under-way", type=int, default=2, help="long prompts at a time")
    parser.add_argument("--load", type=float, help="instead: at fixed times, as a share of one worker's time")
    parser.add_argument("--beside", default="mixed,chunked", help="what to compare with")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each side and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="7m", help="of the random model: see benchmarks checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args(argv)
    with private_ray(arguments.size) as checkpoint:
        found = asyncio.run(measure(arguments, checkpoint))
    print(f"a prompt of {arguments.prompt} tokens alone: {found['prompt_alone_ms']} ms")
    for name, figures in found["sides"].items():
        print(f"{name:14}" + "  ".join(f"{key} {value:9.2f}" for key, value in figures.items()))
    for metric, by_side in found["over_disaggregated"].items():
        print(f"{metric} over disaggregated: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in by_side.items()))
    if arguments.json:
        shown = {n: getattr(arguments, n) for n in ("streams", "prompt", "under_way", "load", "size")}
        print(json.dumps({"benchmark": "interference", **shown, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
