"""Workers that are born before their replicas: on one machine a model can load while Serve is still coming up.

The process that starts everything plants the workers, under names; a replica looks there before it starts a worker of
its own. A worker ends with the replica that has adopted it, as a child would, and by itself if none comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray

from deployments.planted import Planted
from deployments.worker import EngineWorker
from serve_app.ray_private.fork_server import forked
from serve_app.worker.spec import WorkerSpec

log = logging.getLogger("ray.serve")

NAMESPACE = "serve_app"


def available() -> bool:
    """Whether this system can tell a process of another's end without being its parent (Linux)."""
    return hasattr(os, "pidfd_open")


def plant(specs: list[WorkerSpec]) -> list[Any]:
    """Starts engine workers from a driver; they live as long as the returned handles."""
    options = EngineWorker.options  # type: ignore[attr-defined]
    return [options(name=_name(s), namespace=NAMESPACE, **forked(with_torch=True)).remote(s, Planted()) for s in specs]


async def adopt(spec: WorkerSpec) -> Any | None:
    """The planted worker for ``spec`` if there is one, it has loaded and nobody else has it; called by a replica."""
    if not available() or spec.several_nodes or spec.device != "cpu":
        return None
    try:
        worker = await asyncio.to_thread(ray.get_actor, _name(spec), NAMESPACE)
        return worker if await worker.adopt.remote(spec, os.getpid()) else None
    except (ValueError, ray.exceptions.RayError) as error:  # none was planted, or it could not load: a new one says why
        log.info("no planted worker for %s: %s", spec.stage, type(error).__name__)
        return None


def _name(spec: WorkerSpec) -> str:
    return f"planted:{spec.model}:{spec.stage}"
