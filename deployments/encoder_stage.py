"""What the replicas of text encoders share: their worker, and one call that encodes."""

from __future__ import annotations

from typing import Any

from deployments.supervisor import Supervisor, beside
from serve_app.worker.spec import WorkerSpec


class EncoderStage:
    """A replica with one :class:`~deployments.encoder_worker.EncoderWorker` of its own."""

    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        from deployments.encoder_worker import EncoderWorker

        self._stage = spec.stage
        options = EncoderWorker.options(**beside(num_gpus))  # type: ignore[attr-defined]
        self._supervisor = Supervisor(lambda: options.remote(spec), lambda worker: worker.info.remote())
        await self._supervisor.begin()

    async def encode(self, wire: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`deployments.encoder_worker.EncoderWorker.encode`."""
        return await self._supervisor.call(lambda worker: worker.encode.remote(wire))

    async def all_stats(self, wire: dict[str, Any]) -> list[dict[str, Any]]:
        """Counters of this replica's worker; see :meth:`deployments.supervisor.Supervisor.counters`."""
        return [await self._supervisor.counters(self._stage, lambda worker: worker.stats.remote())]

    async def probe(self, wire: dict[str, Any]) -> None:
        """Ends when the worker answers."""
        await self._supervisor.call(lambda worker: worker.info.remote())

    async def check_health(self) -> None:
        await self._supervisor.check(lambda worker: worker.info.remote())
