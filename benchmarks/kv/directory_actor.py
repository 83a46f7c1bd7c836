"""The real directory's actor on a small private Ray; see :mod:`benchmarks.kv.directory`.

What a call costs is the CPU time of the actor's process, everything that Ray does there included: one process has one
core. Ours is what tells and asks; both share the machine, so waits are those of a machine with as many cores as it has.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable
from typing import Any

from benchmarks.checks import Checks
from benchmarks.kv.held import BLOCKS, CHUNKS_OF_PROMPT, World, keys, names
from benchmarks.serving.stack import bare_ray

ASKING = 16  # look-ups at a time
PAUSE_S = 0.02  # between two look-ups while the directory is filled


def measure_actor(world: World, count: int) -> dict[str, Any]:
    """``count`` messages and look-ups; then all pools tell all that they have."""
    with bare_ray(256 << 20):
        import ray

        from serve_app.kv.directory import get_or_create_directory

        actor, checks = get_or_create_directory(), Checks()
        try:
            found = asyncio.run(_Actor(actor, world, checks).measure(count))
        finally:
            ray.kill(actor)
    return found | {"answers_checked": checks.require()}


class _Actor:
    def __init__(self, handle: Any, world: World, checks: Checks) -> None:
        self.handle, self.world, self.checks = handle, world, checks
        self._waits: list[float] = []

    async def measure(self, count: int) -> dict[str, Any]:
        filled = await self._fill()
        prompts = random.Random(3).choices(list(self.world.held), k=count)
        asked = [keys(prompt) for prompt in prompts]
        looks = await self._cost([self._look(*pair) for pair in zip(prompts, asked, strict=True)], ASKING)
        fresh = len(self.world.held)
        told = [self._tell(at % self.world.nodes, names(fresh + at), names(fresh + at - 1)) for at in range(count)]
        return {"filled": filled, "looks": looks, "messages": await self._cost(told, self.world.nodes)}

    async def _fill(self) -> dict[str, Any]:
        """Each pool sends a message when the one before is answered, as the product's do."""
        messages = [list(self.world.messages(node)) for node in range(self.world.nodes)]
        await self._seconds()  # it is up
        self._waits, longest = [], 0.0

        async def pool(node: int) -> None:
            nonlocal longest
            for message in messages[node]:
                began = time.perf_counter()
                await self._tell(node, message, [])
                longest = max(longest, time.perf_counter() - began)

        began, used = time.perf_counter(), await self._seconds()
        asking = asyncio.create_task(self._ask_on())
        await asyncio.gather(*map(pool, range(self.world.nodes)))
        seconds, used = time.perf_counter() - began, await self._seconds() - used
        asking.cancel()
        held = (await self.handle.stats.remote())["names"]
        self.checks.equal("names of the actor", held, len(self.world.held) * CHUNKS_OF_PROMPT)
        return {"seconds": round(seconds, 2), "actor_cpu_s": round(used, 2), "longest_message_s": round(longest, 3),
                **self._quantiles("look_meanwhile")}  # fmt: skip

    async def _ask_on(self) -> None:
        unknown = keys(-1)
        while True:
            await self._timed(self.handle.best.remote(unknown))
            await asyncio.sleep(PAUSE_S)

    async def _cost(self, calls: list[Any], width: int) -> dict[str, Any]:
        """``width`` of the calls at a time."""
        self._waits = []
        left = iter(calls)

        async def some() -> None:
            for call in left:
                await call

        began, used = time.perf_counter(), await self._seconds()
        await asyncio.gather(*(some() for _ in range(width)))
        seconds, used = time.perf_counter() - began, await self._seconds() - used
        return {
            "actor_us_per_call": round(used / len(calls) * 1e6, 1),
            "calls_per_s_of_a_core": round(len(calls) / used),
            "calls_per_s_here": round(len(calls) / seconds),
            **self._quantiles("wait"),
        }

    async def _look(self, prompt: int, asked: list[bytes]) -> None:
        found = await self._timed(self.handle.best.remote(asked))
        wanted = {(f"n{node}", CHUNKS_OF_PROMPT * BLOCKS) for node in self.world.held[prompt]}
        self.checks.equal("a look-up of the actor", {tuple(pair) for pair in found}, wanted)

    async def _tell(self, node: int, added: list[bytes], removed: list[bytes]) -> None:
        _, unknown, _ = await self._timed(self.handle.update.remote(f"n{node}", "pool", added, removed))
        self.checks.that("a message", isinstance(unknown, bool), "no answer")

    async def _timed(self, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        found = await call
        self._waits.append(time.perf_counter() - began)
        return found

    async def _seconds(self) -> float:
        """CPU time that the actor's process has used."""
        return float(await self.handle.__ray_call__.remote(lambda _: time.process_time()))

    def _quantiles(self, name: str) -> dict[str, float]:
        waits = sorted(self._waits) or [0.0]
        return {f"{name}_p50_ms": round(statistics.median(waits) * 1e3, 2),
                f"{name}_p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 2)}  # fmt: skip
