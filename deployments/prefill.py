"""Prefill: computes prompts' K/V and publishes them in the pool."""

from __future__ import annotations

from ray import serve

from deployments.stage import EngineStage
from serve_app.worker.spec import WorkerSpec


@serve.deployment(name="Prefill")
class Prefill(EngineStage):
    stage = role = "prefill"

    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        EngineStage.__init__(self)
        await self.start_worker(spec, num_gpus)
