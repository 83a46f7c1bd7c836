"""What the replicas of text encoders share: their worker, and one call that encodes."""

from __future__ import annotations

from deployments.supervisor import Supervisor, beside
from serve_app import logs
from serve_app.wire.replicas import AllCounters, Nothing
from serve_app.worker.spec import WorkerSpec


class EncoderStage:
    """A replica with one :class:`~deployments.encoder_worker.EncoderWorker` of its own."""

    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        from deployments.encoder_worker import EncoderWorker

        logs.set_up(f"{spec.stage} replica")
        self._stage = spec.stage
        options = EncoderWorker.options(**beside(num_gpus))  # type: ignore[attr-defined]
        self._supervisor = Supervisor(
            lambda: options.remote(spec), lambda worker: worker.ready.remote(), device=num_gpus > 0
        )
        await self._supervisor.begin()

    async def encode(self, call: bytes) -> bytes:
        """See :class:`serve_app.wire.encode.EncodeCall`."""
        return await self._supervisor.call(lambda worker: worker.encode.remote(call))

    async def all_stats(self, call: bytes) -> bytes:
        """Counters of this replica's worker; see :meth:`deployments.supervisor.Supervisor.counters`."""
        return AllCounters((await self._supervisor.counters(self._stage),)).encode()

    async def probe(self, call: bytes) -> bytes:
        """Ends when the worker answers."""
        await self._supervisor.call(lambda worker: worker.ready.remote())
        return Nothing().encode()

    async def check_health(self) -> None:
        await self._supervisor.check(lambda worker: worker.ready.remote())
