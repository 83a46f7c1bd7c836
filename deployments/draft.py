"""Draft: a small model that proposes tokens for several decode workers."""

from __future__ import annotations

import uuid
from typing import Any

from ray import serve

from deployments.draft_link import NAMESPACE
from deployments.spec import WorkerSpec


@serve.deployment(name="Draft")
class Draft:
    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:
        from deployments.draft_worker import DraftWorker

        # Decode workers call the actor directly: a proposal per step can't afford a way through Serve.
        self._name = f"draft:{spec.model}:{uuid.uuid4().hex[:12]}"
        self._worker = DraftWorker.options(name=self._name, namespace=NAMESPACE, num_gpus=num_gpus).remote(spec)
        await self._worker.stats.remote()

    async def worker_name(self) -> str:
        return self._name

    async def stats(self) -> dict[str, Any]:
        return await self._worker.stats.remote()

    async def check_health(self) -> None:
        await self._worker.stats.remote()
