"""Draft: a small model that proposes tokens for several decode workers."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from ray import serve

from deployments.supervisor import Supervisor, beside
from deployments.tenancy import tenancy
from serve_app import logs
from serve_app.progress import read_progress
from serve_app.worker.spec import WorkerSpec

# Long enough for a small machine; a target that takes longer does not wait for its draft model either.
TARGET_WAIT_S = 20.0


async def _after_the_target(model: str) -> None:
    """Leaves a small machine's cores to the workers without which nothing is answered."""
    until = time.monotonic() + TARGET_WAIT_S
    while time.monotonic() < until:
        progress = await asyncio.to_thread(read_progress)
        steps = {e.stage: e.step for e in progress if e.model == model}
        if steps.get("decode") == "ready" and steps.get("prefill", "ready") == "ready":
            return
        await asyncio.sleep(0.5)


@serve.deployment(name="Draft")
class Draft:
    async def __init__(self, spec: WorkerSpec, num_gpus: float = 0) -> None:  # type: ignore[misc]
        logs.set_up("draft replica")
        self._spec = spec
        self._num_gpus = num_gpus
        self._name = ""
        self._supervisor = Supervisor(
            self._start, lambda worker: worker.stats.remote(), device=num_gpus > 0, tenancy=tenancy(spec)
        )
        if spec.device == "cpu":
            await _after_the_target(spec.model)
        await self._supervisor.begin()

    def _start(self) -> Any:
        from deployments.draft_worker import NAMESPACE, DraftWorker

        # Decode workers call the actor directly, by name: a proposal per step can't afford a way through Serve.
        self._name = f"draft:{self._spec.model}:{uuid.uuid4().hex[:12]}"
        options = DraftWorker.options(name=self._name, namespace=NAMESPACE, **beside(self._num_gpus))  # type: ignore[attr-defined]
        return options.remote(self._spec)

    async def worker_name(self) -> str:
        """The name of a draft worker that is ready."""
        await self._supervisor.call(lambda worker: worker.stats.remote())
        return self._name

    async def stats(self) -> bytes:
        """See :meth:`deployments.supervisor.Supervisor.counters`."""
        return (await self._supervisor.counters("draft")).encode()

    async def check_health(self) -> None:
        await self._supervisor.check(lambda worker: worker.stats.remote())
