"""EncoderWorker: the Ray actor around a text encoder."""

from __future__ import annotations

import os

import ray

from serve_app.wire.encode import read_encode_call
from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec


@ray.remote(num_cpus=0, max_concurrency=4096)
class EncoderWorker:
    """The work is :class:`serve_app.worker.encoder_work.EncoderWork`."""

    def __init__(self, spec: WorkerSpec) -> None:
        progress = begin(spec)
        progress("importing")
        from serve_app.worker.encoder_work import EncoderWork

        self._work = EncoderWork(spec, progress)

    async def encode(self, call: bytes) -> bytes:
        return (await self._work.encode(read_encode_call(call))).encode()

    async def ready(self) -> int:
        """Ends once the model is loaded; this process's id."""
        return os.getpid()

    async def stats(self) -> bytes:
        return self._work.stats().encode()

    async def pulse(self) -> bytes:
        """For :class:`deployments.supervisor.Supervisor`."""
        return self._work.pulse().encode()
