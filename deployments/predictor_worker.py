"""PredictorWorker: the Ray actor around a model that answers each input by itself."""

from __future__ import annotations

import os

import ray

from serve_app.wire.predict import read_predict_call, read_progress_call
from serve_app.worker.birth import begin
from serve_app.worker.spec import WorkerSpec


@ray.remote(num_cpus=0, max_concurrency=4096)
class PredictorWorker:
    """The work is :class:`serve_app.worker.predict_work.PredictWork`."""

    def __init__(self, spec: WorkerSpec) -> None:
        progress = begin(spec)
        progress("importing")
        from serve_app.worker.predict_work import PredictWork

        self._work = PredictWork(spec, progress)

    async def predict(self, call: bytes) -> bytes:
        return (await self._work.predict(read_predict_call(call))).encode()

    async def progress(self, call: bytes) -> bytes:
        return self._work.progress(read_progress_call(call)).encode()

    async def ready(self) -> int:
        """Ends once the model is loaded; this process's id."""
        return os.getpid()

    async def stats(self) -> bytes:
        return self._work.stats().encode()

    async def pulse(self) -> bytes:
        """For :class:`deployments.supervisor.Supervisor`."""
        return self._work.pulse().encode()
