"""Draft: a small model that proposes tokens for several decode workers."""

from __future__ import annotations

import uuid
from typing import Any

from ray import serve

from deployments.draft_link import NAMESPACE
from deployments.spec import WorkerSpec
from deployments.supervisor import Supervisor


@serve.deployment(name="Draft")
class Draft:
    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        self._spec = spec
        self._num_gpus = num_gpus
        self._name = ""
        self._supervisor = Supervisor(self._start, lambda worker: worker.stats.remote())
        await self._supervisor.begin()

    def _start(self) -> Any:
        from deployments.draft_worker import DraftWorker

        # Decode workers call the actor directly, by name: a proposal per step can't afford a way through Serve.
        self._name = f"draft:{self._spec.model}:{uuid.uuid4().hex[:12]}"
        options = DraftWorker.options(name=self._name, namespace=NAMESPACE, num_gpus=self._num_gpus)  # type: ignore[attr-defined]
        return options.remote(self._spec)

    async def worker_name(self) -> str:
        """The name of a draft worker that is ready."""
        await self.stats()
        return self._name

    async def stats(self) -> dict[str, Any]:
        return await self._supervisor.call(lambda worker: worker.stats.remote())

    async def check_health(self) -> None:
        await self._supervisor.check(lambda worker: worker.stats.remote())
