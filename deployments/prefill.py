"""Prefill: computes prompts' K/V and publishes them in the pool."""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.spec import WorkerSpec
from deployments.stage import EngineStage


@serve.deployment(name="Prefill")
class Prefill(EngineStage):
    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        await self.start_worker(spec, num_gpus)

    async def prefill(self, wire: dict[str, Any]) -> dict[str, Any]:
        """``{"id", "ids", "salt"}`` -> ``{"cached"}`` once the pool holds the K/V of all ``ids``."""
        return await self.run_on_worker(wire["id"], lambda worker: worker.prefill.remote(wire))
