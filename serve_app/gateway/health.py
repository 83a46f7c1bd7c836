"""Which models answer, and how far the others have come. Reads Serve's status and the workers' own progress."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.catalog.tasks import TaskDeclaration, declared
from serve_app.gateway.memory import MemoryWatch
from serve_app.gateway.models import Models
from serve_app.progress import LoadProgress, read_progress
from serve_app.ray_private.status import applications, live_deployments
from serve_app.tasks.model import ServedModel, application_name

log = logging.getLogger("ray.serve")

PROBE_TIMEOUT_S = 10.0
# A gateway that starts beside running models says "loading" of them until it has looked once.
FIRST_LOOK_S = 5.0
# Characters of what Serve says that are told.
TOLD = 500


class HealthMonitor:
    """Keeps ``ready`` and ``detail`` of every model fresh: several times a second while loading, seldom afterwards."""

    LOADING_PERIOD_S = 0.4
    READY_PERIOD_S = 3.0

    def __init__(self, models: Models, probe: Callable[[ServedModel], Awaitable[Any]]) -> None:
        self._models = models
        self._probe = probe
        self._started = time.time()
        self.memory = MemoryWatch(models)
        self._task: asyncio.Task | None = None
        self._looked = asyncio.Event()

    async def start(self) -> None:
        """Returns after the first look, or without it after some seconds: Serve's controller may be away."""
        self._task = asyncio.ensure_future(self._watch())
        self.memory.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), FIRST_LOOK_S)

    @property
    def ready(self) -> bool:
        return all(m.ready or m.scales_to_zero or m.by_hand for m in self._models)

    @property
    def settled(self) -> bool:
        """Whether nothing is loading any more, optional parts included."""
        return self.ready and all(m.detail.get("state") == "running" for m in self._models)

    def report(self) -> dict[str, Any]:
        """The body of ``GET /health``."""
        models: dict[str, dict[str, Any]] = {m.id: {"ready": m.ready, **m.detail} for m in self._models}
        status = "ready" if self.ready else "loading"
        found = {"status": status, "seconds": round(time.time() - self._started, 1), "models": models}
        if total := self.memory.total():
            found["memory"] = total
        for model, shown in models.items():
            if told := self.memory.of(model):
                shown["memory"] = told
        return found

    async def _watch(self) -> None:
        while True:
            try:
                await self.refresh()
                self._looked.set()
            except Exception as error:  # the controller may be restarting; what was known stays
                log.warning("model status can't be read at the moment: %s", type(error).__name__)
            await asyncio.sleep(self.READY_PERIOD_S if self.settled else self.LOADING_PERIOD_S)

    async def refresh(self) -> None:
        applications, progress = await asyncio.to_thread(_read)
        by_model: dict[str, list[LoadProgress]] = {}
        for entry in progress:
            by_model.setdefault(entry.model, []).append(entry)
        for model in self._models:
            application = applications.get(application_name(model.id))
            if application is None:
                model.ready, model.detail = False, {"state": "waiting"}
                continue
            serving = can_serve(application, declared()[model.record.task], model.ready)
            # A model that may have no replica is not woken just to see whether it answers.
            if serving and not model.ready and not model.scales_to_zero:
                serving = await self._answers(model)
            model.ready = serving
            model.detail = {"state": application.state}
            if application.message:
                model.detail["message"] = shortened(application.message)
            if application.troubles:
                model.detail["deployments"] = {name: shortened(said) for name, said in application.troubles.items()}
            if application.state != "running":
                model.detail["stages"] = {
                    e.stage: {"step": e.step, "seconds": round(time.time() - e.since, 1)}
                    for e in by_model.get(model.id, [])
                }

    async def _answers(self, model: ServedModel) -> bool:
        """A first call, which also spares the first client the set-up of the connection."""
        try:
            await asyncio.wait_for(self._probe(model), PROBE_TIMEOUT_S)
        except Exception as error:
            log.info("%s does not answer yet: %s", model.id, type(error).__name__)
            return False
        return True


@dataclass(slots=True, frozen=True)
class ApplicationState:
    """What Serve says of one application; ``answering``: by deployment, whether it has replicas."""

    state: str
    message: str
    answering: Mapping[str, bool]
    # What Serve says of deployments that are not as they should be: of one that waits for room, what it needs.
    troubles: Mapping[str, str] = field(default_factory=dict)


def can_serve(application: ApplicationState, task: TaskDeclaration, before: bool) -> bool:
    """Whether a model's requests can be answered now; ``before``: they could be.

    While an application comes up for the first time, every stage that answers depend on has to be there. One that has
    lost replicas since needs a stage that answers by itself, whatever the others have lost.
    """
    if application.state == "running":
        return True
    if application.state not in ("deploying", "deploy_failed", "unhealthy"):
        return False
    needed = [answers for name, answers in application.answering.items() if name.lower() not in task.optional_stages]
    if needed and all(needed):
        return True
    able = (application.answering.get(stage.capitalize(), False) for stage in task.answering_stages or task.stages[:1])
    return any(able) and (before or application.state != "deploying")


def has_replicas(deployment: dict[str, Any]) -> bool:
    """While a deployment is upgraded it is not healthy, but has a running replica of the old or the new kind. A
    controller that was lost and has come back calls replicas that never stopped ``RECOVERING`` until it has asked them.
    """
    running = any(replica["state"] in ("RUNNING", "RECOVERING") for replica in deployment["replicas"])
    return deployment["status"] == "HEALTHY" or running


def troubles_of(deployments: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What Serve says, by deployment, of those that are not healthy. A replica for which there is no room waits, and
    after half a minute that is told with what it needs and what there is.
    """
    return {
        name.lower(): each["message"]
        for name, each in deployments.items()
        if each["status"] != "HEALTHY" and each["message"]
    }


def shortened(said: str) -> str:
    """How it begins and how it ends, since a traceback has the cause last."""
    if len(said) <= TOLD:
        return said
    begins = said.partition("\n")[0][: TOLD // 4]
    return f"{begins}\n...\n{said[len(begins) + 5 - TOLD :]}"


def _read() -> tuple[dict[str, ApplicationState], list[LoadProgress]]:
    found = {}
    for name, application in applications().items():
        # While Serve builds an application anew, and for good where that fails, it tells nothing of its
        # deployments, which go on.
        deployments = application["deployments"] or live_deployments(name)
        answering = {name: has_replicas(deployment) for name, deployment in deployments.items()}
        troubles = troubles_of(deployments)
        found[name] = ApplicationState(application["status"].lower(), application["message"], answering, troubles)
    # Whose model runs has none to tell, and each worker's costs a call.
    loading = any(application.state != "running" for application in found.values())
    return found, read_progress() if loading else []
