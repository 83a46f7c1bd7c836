"""Engine workers without Serve around them: started with a tiny model, asked as a replica asks them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from deployments.worker import EngineWorker, WorkerHandle
from serve_app.channel.inbox import TokenInbox
from serve_app.ray_private.fork_server import forked
from serve_app.sampling_params import SamplingParams
from serve_app.wire.address import InboxAddress
from serve_app.wire.generate import (
    ArrivingCall,
    Failed,
    GenerateCall,
    Generated,
    GenerateResult,
    PrefillCall,
    PrefillDone,
)
from serve_app.wire.load import LoadReport
from serve_app.worker.spec import WorkerSpec

SALT = b"one tenant's salt, which nobody can guess"
_numbers = itertools.count()


def start(path: Path, stage: str, *, node_id: str | None = None, **options: Any) -> WorkerHandle:
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
    return WorkerHandle(EngineWorker.options(**placed, **forked(with_torch=True)).remote(spec))  # type: ignore[attr-defined]


class Caller:
    """A gateway's and a replica's part in a request, for one test. Workers on other machines reach it at ``host``."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    async def __aenter__(self) -> Caller:
        self.reports: list[LoadReport] = []
        self._inbox = TokenInbox(
            on_load=lambda _, report: report is not None and self.reports.append(report), host=self._host
        )
        await self._inbox.start()
        return self

    @property
    def address(self) -> InboxAddress:
        return self._inbox.address

    async def __aexit__(self, *exception: object) -> None:
        await self._inbox.aclose()

    def call(self, ids: list[int], *, salt: bytes = SALT, **sampling: Any) -> GenerateCall:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **sampling})
        name = f"request-{next(_numbers)}"
        return GenerateCall(name, np.array(ids, np.int32).tobytes(), salt, params, self._inbox.address)

    async def generate(self, worker: WorkerHandle, ids: list[int], **sampling: Any) -> tuple[list[int], Generated]:
        """Generated tokens and the worker's result."""
        return await self.finished(self.call(ids, **sampling), worker)

    async def finished(self, call: GenerateCall, worker: WorkerHandle) -> tuple[list[int], Generated]:
        tokens, result = await self.follow(call, worker)
        assert isinstance(result, Generated), result
        return tokens, result

    async def follow(
        self, call: GenerateCall, worker: WorkerHandle, *, arriving: bool = False
    ) -> tuple[list[int], GenerateResult]:
        """``arriving``: the worker has answered that the prompt is missing, and it is being prefilled."""
        stream = self._inbox.open_stream(call.id, call.resumed)

        async def read() -> list[int]:
            return [token async for item in stream for token in item.ids]

        reading = asyncio.ensure_future(read())
        try:
            result = await (worker.arriving(ArrivingCall(call.id)) if arriving else worker.generate(call))
            if not isinstance(result, Generated):
                return [], result
            for item in result.undelivered:
                stream.feed(item)
            return await reading, result
        finally:
            reading.cancel()
            self._inbox.close_stream(call.id)

    async def prefill(self, worker: WorkerHandle, ids: list[int], *, salt: bytes = SALT) -> PrefillDone:
        """All of ``ids`` but the last."""
        prompt = np.array(ids[:-1], np.int32).tobytes()
        done = await worker.prefill(PrefillCall(f"prefill-{next(_numbers)}", prompt, salt))
        assert not isinstance(done, Failed), done
        return done
