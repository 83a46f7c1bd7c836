"""Engine workers without Serve around them: started with a tiny model, asked as a replica asks them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from deployments.worker import EngineWorker
from serve_app.channel.frames import InboxAddress, TokenItem
from serve_app.channel.inbox import TokenInbox
from serve_app.channel.load import LoadReport
from serve_app.engine.request import SamplingParams
from serve_app.worker.spec import WorkerSpec

SALT = b"one tenant's salt, which nobody can guess"
_numbers = itertools.count()


def start(path: Path, stage: str, *, node_id: str | None = None, **options: Any) -> Any:
    """A worker actor; ``node_id`` places it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    spec = WorkerSpec(
        **{
            "model": "tiny",
            "stage": stage,
            "weights": {"path": str(path)},
            "source": str(path),
            "home": str(path.parent),
            "dtype": "float32",
            "cpu_threads": 1,
            "publish": True,
            **options,
        }
    )
    placed = {} if node_id is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
    return EngineWorker.options(**placed).remote(spec)  # type: ignore[attr-defined]


class Caller:
    """A gateway's and a replica's part in a request, for one test."""

    async def __aenter__(self) -> Caller:
        self.reports: list[LoadReport] = []
        self._inbox = TokenInbox(on_load=lambda _, report: report is not None and self.reports.append(report))
        await self._inbox.start()
        return self

    @property
    def address(self) -> InboxAddress:
        return self._inbox.address

    async def __aexit__(self, *exception: object) -> None:
        await self._inbox.aclose()

    def wire(self, ids: list[int], *, salt: bytes = SALT, **sampling: Any) -> dict[str, Any]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling})
        return {
            "id": f"request-{next(_numbers)}",
            "ids": np.array(ids, np.int32).tobytes(),
            "salt": salt,
            "sampling": params.to_wire(),
            "inbox": self._inbox.address.to_wire(),
        }

    async def generate(self, worker: Any, ids: list[int], **sampling: Any) -> tuple[list[int], dict[str, Any]]:
        """Generated tokens and the worker's result."""
        return await self.follow(self.wire(ids, **sampling), worker)

    async def follow(self, wire: dict[str, Any], worker: Any) -> tuple[list[int], dict[str, Any]]:
        stream = self._inbox.open_stream(wire["id"], wire.get("resumed", 0))

        async def read() -> list[int]:
            return [token async for item in stream for token in item.ids]

        reading = asyncio.ensure_future(read())
        try:
            result = await worker.generate.remote(wire)
            if "finish" not in result:
                return [], result
            for item in result["undelivered"]:
                stream.feed(TokenItem.from_wire(item))
            return await reading, result
        finally:
            reading.cancel()
            self._inbox.close_stream(wire["id"])

    async def prefill(self, worker: Any, ids: list[int], *, salt: bytes = SALT) -> dict[str, Any]:
        wire = self.wire(ids, salt=salt)
        return await worker.prefill.remote({"id": wire["id"], "salt": salt, "ids": wire["ids"][:-4]})
