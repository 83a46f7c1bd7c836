"""What replicas with one worker and one method share: embeddings, rerankers, predictors."""

from __future__ import annotations

from typing import Any

from deployments.supervisor import Supervisor, beside
from deployments.tenancy import tenancy
from serve_app import logs
from serve_app.wire.replicas import AllCounters, Nothing
from serve_app.worker.spec import WorkerSpec


class SingleStage:
    """A replica with one worker of its own, an actor of the class that :meth:`worker_class` tells."""

    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        logs.set_up(f"{spec.stage} replica")
        self._stage = spec.stage
        options = self.worker_class().options(**beside(num_gpus))
        self._supervisor = Supervisor(
            lambda: options.remote(spec),
            lambda worker: worker.ready.remote(),
            device=num_gpus > 0,
            tenancy=tenancy(spec),
        )
        await self._supervisor.begin()

    def worker_class(self) -> Any:
        """An actor class, imported when it is asked for: what it needs is not for replicas."""
        raise NotImplementedError

    async def all_stats(self, call: bytes) -> bytes:
        """Counters of this replica's worker; see :meth:`deployments.supervisor.Supervisor.counters`."""
        return AllCounters((await self._supervisor.counters(self._stage),)).encode()

    async def probe(self, call: bytes) -> bytes:
        """Ends when the worker answers."""
        await self._supervisor.call(lambda worker: worker.ready.remote())
        return Nothing().encode()

    async def check_health(self) -> None:
        await self._supervisor.check(lambda worker: worker.ready.remote())


class EncoderStage(SingleStage):
    """A replica of a text encoder."""

    def worker_class(self) -> Any:
        from deployments.encoder_worker import EncoderWorker

        return EncoderWorker

    async def encode(self, call: bytes) -> bytes:
        """See :class:`serve_app.wire.encode.EncodeCall`."""
        return await self._supervisor.call(lambda worker: worker.encode.remote(call))
