"""The simulated engine: a decode deployment that answers with fixed token ids at once, over the real token channel.

It answers everything that a gateway asks of a decode stage, load reports included, so requests take the gateway's
usual way. The prompt is never looked at.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import yaml

from benchmarks import CHECKPOINTS

MODEL = "@cf/benchmark/simulated"
FIRST_ID = 300  # ids of the answer: this one and those that follow
SLOTS, BLOCKS, BLOCK_TOKENS = 256, 90_000, 32


def write_record(home: Path) -> None:
    """Puts the model into a state directory's catalogue: pico-instruct's record and tokenizer, one decode stage."""
    from serve_app.catalog.load import BUILT_IN

    record = yaml.safe_load((BUILT_IN / "pico-instruct.yaml").read_text())
    del record["draft"]
    decode = {"max_replicas": 1, "num_cpus": 0.25, "kv_cache_bytes": "1MiB", "max_num_seqs": SLOTS}
    record |= {"id": MODEL, "weights": {"path": str(CHECKPOINTS / "pico-instruct")}}
    record["serving"] = {"local": {"decode": decode}}
    (home / "models").mkdir(parents=True, exist_ok=True)
    (home / "models" / "simulated.yaml").write_text(yaml.safe_dump(record))


def answer_text(tokens: int) -> str:
    """What a client reads of an answer of ``tokens`` tokens."""
    from serve_app.text.tokenizer import Tokenizer

    return Tokenizer(CHECKPOINTS / "pico-instruct").decode(list(range(FIRST_ID, FIRST_ID + tokens)))


class SimulatedDecode:
    """The calls of :class:`deployments.decode.Decode` that gateways make."""

    def __init__(self) -> None:
        import ray
        from ray import serve

        from serve_app.channel.reporter import LoadReporter
        from serve_app.channel.sender import TokenSender

        self._node = ray.get_runtime_context().get_node_id()
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._sender = TokenSender(ray.get_runtime_context().get_actor_id())
        self._reporter = LoadReporter(self._sender, self._load)
        self._running = 0

    async def generate(self, call: bytes, replica: str = "") -> bytes:
        """As many tokens as asked for, one frame each."""
        from serve_app.wire.generate import Generated, PromptPath, read_generate_call
        from serve_app.wire.tokens import TokenItem

        asked = read_generate_call(call)
        name, count = asked.id, asked.sampling.max_tokens
        self._running += 1
        self._reporter.changed()
        try:
            self._sender.open(name, asked.inbox, asked.resumed)
            for index in range(asked.resumed, count):
                finish = "length" if index == count - 1 else None
                cached = 0 if index == 0 else None
                self._sender.send([TokenItem(name, index, (FIRST_ID + index,), finish, cached=cached)])
                await asyncio.sleep(0)
            rest = tuple(self._sender.undelivered(name))
            return Generated("length", 0, PromptPath(), rest, self._replica).encode()
        finally:
            self._sender.close(name)
            self._running -= 1
            self._reporter.changed()

    async def generate_many(self, call: bytes, replica: str = "") -> bytes:
        """Each as :meth:`generate` has it; every end is told at once."""
        from serve_app.wire.generate import (
            Failed,
            GenerateCall,
            Generated,
            GeneratedMany,
            read_ending,
            read_generate_many,
        )
        from serve_app.wire.tokens import Ending

        async def one(asked: GenerateCall) -> Generated | Failed:
            ended = await self.generate(asked.encode())
            if asked.inbox is not None:
                self._sender.ended(asked.inbox, Ending(asked.id, ended))
            return read_ending(ended)

        running = [one(asked) for asked in read_generate_many(call).calls]
        return GeneratedMany(tuple(await asyncio.gather(*running))).encode()

    async def probe(self, call: bytes) -> bytes:
        from serve_app.wire.replicas import Nothing

        return Nothing().encode()

    async def wake(self, call: bytes) -> bytes:
        return await self.probe(call)

    async def collect(self, call: bytes) -> bytes:
        from serve_app.wire.generate import Collected, read_collect_call

        return Collected(tuple(self._sender.undelivered(read_collect_call(call).id))).encode()

    async def subscribe(self, call: bytes) -> bytes:
        from serve_app.wire.replicas import Subscribed, read_subscribe

        gateway = read_subscribe(call)
        self._reporter.subscribe(gateway.inbox, gateway.lease_s)
        self._reporter.changed()
        return Subscribed(self._replica).encode()

    async def all_stats(self, call: bytes) -> bytes:
        from serve_app.wire.replicas import AllCounters, Counters

        counters = {"running": self._running, "waiting": 0, "used_blocks": 0, "total_blocks": BLOCKS}
        return AllCounters((Counters("decode", os.getpid(), counters),)).encode()

    def _load(self) -> Any:
        from serve_app.wire.load import LoadReport

        return LoadReport(
            replica=self._replica,
            model=MODEL,
            stage="decode",
            role="mixed",
            node=self._node,
            running=self._running,
            max_seqs=SLOTS,
            total_blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=8192,
        )


def simulated_engine() -> Any:
    """The Serve application that stands in for the model's own."""
    from ray import serve

    return serve.deployment(
        SimulatedDecode, name="Decode", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.25}
    ).bind()
