"""What the replicas of prefill and decode share: their engine worker, and passing a request's life on to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.spec import WorkerSpec
from deployments.supervisor import Supervisor


class EngineStage:
    """A replica with one :class:`~deployments.worker.EngineWorker` of its own."""

    supervisor: Supervisor

    async def start_worker(self, spec: WorkerSpec, num_gpus: float) -> None:
        from deployments.worker import EngineWorker

        options = EngineWorker.options(num_gpus=num_gpus)  # type: ignore[attr-defined]
        self.supervisor = Supervisor(lambda: options.remote(spec), self.greet)
        await self.supervisor.begin()

    async def greet(self, worker: Any) -> None:
        """Awaits a new worker's readiness."""
        await worker.info.remote()

    async def run_on_worker(self, request_id: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Awaits a call on the worker. A cancelled caller (the client has gone) aborts the request there at once."""
        try:
            return await self.supervisor.call(call)
        except asyncio.CancelledError:
            self.supervisor.tell(lambda worker: worker.abort.remote(request_id))
            raise

    async def stats(self) -> dict[str, Any]:
        return await self.supervisor.call(lambda worker: worker.stats.remote())

    async def all_stats(self, wire: dict[str, Any]) -> list[dict[str, Any]]:
        """Counters of one worker of each stage behind this deployment."""
        return [await self.stats()]

    async def check_health(self) -> None:
        await self.supervisor.check(lambda worker: worker.check.remote())
