"""Which models answer, and how far the others have come. Reads Serve's status and the workers' own progress."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from serve_app.gateway.models import Models, application_name
from serve_app.progress import LoadProgress, read_progress

log = logging.getLogger("ray.serve")


class HealthMonitor:
    """Keeps ``ready`` and ``detail`` of every model fresh: several times a second while loading, seldom afterwards."""

    LOADING_PERIOD_S = 0.4
    READY_PERIOD_S = 3.0

    def __init__(self, models: Models) -> None:
        self._models = models
        self._started = time.time()
        self._task: asyncio.Task | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._watch())

    @property
    def ready(self) -> bool:
        return all(m.ready or m.scales_to_zero for m in self._models)

    def report(self) -> dict[str, Any]:
        """The body of ``GET /health``."""
        models = {m.id: {"ready": m.ready, **m.detail} for m in self._models}
        status = "ready" if self.ready else "loading"
        return {"status": status, "seconds": round(time.time() - self._started, 1), "models": models}

    async def _watch(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception as error:  # the controller may be restarting; what was known stays
                log.warning("model status can't be read at the moment: %s", type(error).__name__)
            await asyncio.sleep(self.READY_PERIOD_S if self.ready else self.LOADING_PERIOD_S)

    async def refresh(self) -> None:
        applications, progress = await asyncio.to_thread(_read)
        by_model: dict[str, list[LoadProgress]] = {}
        for entry in progress:
            by_model.setdefault(entry.model, []).append(entry)
        for model in self._models:
            application = applications.get(application_name(model.id))
            model.ready = application is not None and application["status"] == "RUNNING"
            model.detail = {"state": application["status"].lower() if application else "waiting"}
            if application and application["message"] and not model.ready:
                model.detail["message"] = application["message"][:500]
            if not model.ready:
                model.detail["stages"] = {
                    e.stage: {"step": e.step, "seconds": round(time.time() - e.since, 1)} for e in by_model.get(model.id, [])
                }


def _read() -> tuple[dict[str, dict[str, str]], list[LoadProgress]]:
    from ray import serve

    status = serve.status()
    applications = {
        name: {"status": app.status.value if hasattr(app.status, "value") else str(app.status), "message": app.message}
        for name, app in status.applications.items()
    }
    return applications, read_progress()
