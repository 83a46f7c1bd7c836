"""Predictor: tasks whose models answer each input by itself. What a task's worker does lies in its own folder."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.blueprint import Blueprint
from deployments.single_stage import SingleStage


@serve.deployment(name="Predictor")
class Predictor(SingleStage):
    """Inputs to results, one by one."""

    def worker_class(self) -> Any:
        from deployments.predictor_worker import PredictorWorker

        return PredictorWorker

    async def predict(self, call: bytes) -> bytes:
        """See :class:`serve_app.wire.predict.PredictCall`."""
        return await self._supervisor.call(lambda worker: worker.predict.remote(call))

    async def progress(self, call: bytes) -> bytes:
        """See :class:`serve_app.wire.predict.ProgressCall`."""
        return await self._supervisor.call(lambda worker: worker.progress.remote(call))


def application(model: Blueprint) -> Application:
    """The only deployment of such a model."""
    return model.sized(Predictor, "predictor").bind(model.spec("predictor"), model.gpus("predictor"))
