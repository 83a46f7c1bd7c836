"""What the replicas of all model stages share: starting their worker, and passing a request's life on to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from deployments.spec import WorkerSpec


class WorkerLost(RuntimeError):
    """The engine worker died while it had this request; the request may be tried elsewhere."""


class EngineStage:
    """A replica with one :class:`~deployments.worker.EngineWorker` of its own.

    The worker is owned by the replica's process: it ends with it. If the worker ends first, the health check fails and
    Serve replaces both.
    """

    worker: Any

    async def start_worker(self, spec: WorkerSpec, num_gpus: float) -> dict[str, Any]:
        from deployments.worker import EngineWorker

        self.worker = EngineWorker.options(num_gpus=num_gpus).remote(spec)
        return await self.worker.info.remote()

    async def run_on_worker(self, request_id: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Awaits a call on the worker. A cancelled caller (the client has gone) aborts the request there at once."""
        try:
            return await call()
        except asyncio.CancelledError:
            self.worker.abort.remote(request_id)
            raise
        except ray.exceptions.RayActorError as lost:
            raise WorkerLost("the engine worker was lost") from lost

    async def stats(self) -> dict[str, Any]:
        return await self.worker.stats.remote()

    async def all_stats(self, wire: dict[str, Any]) -> list[dict[str, Any]]:
        """Counters of one worker of each stage behind this deployment."""
        return [await self.stats()]

    async def check_health(self) -> None:
        await self.worker.check.remote()
