"""Workers that are born before their replicas: on one machine a model can load while Serve is still coming up.

The process that starts everything plants the workers, under names; a replica looks there before it starts a worker of
its own. A worker ends with the replica that has adopted it, as a child would, and by itself if none comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any

import ray

from serve_app.ray_private.fork_server import forked
from serve_app.worker.spec import WorkerSpec

log = logging.getLogger("ray.serve")

NAMESPACE = "serve_app"
UNCLAIMED_S = 180.0
# Ray is told that a worker ends, and given so long for it.
LEAVE_S = 2.0


def available() -> bool:
    """Whether this system can tell a process of another's end without being its parent (Linux)."""
    return hasattr(os, "pidfd_open")


def plant(specs: list[WorkerSpec]) -> list[Any]:
    """Starts engine workers from a driver; they live as long as the returned handles."""
    from deployments.worker import EngineWorker

    options = EngineWorker.options  # type: ignore[attr-defined]
    return [options(name=_name(s), namespace=NAMESPACE, **forked(with_torch=True)).remote(s, Claim()) for s in specs]


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


class Claim:
    """A planted worker's side. It travels to the worker unset and begins there with :meth:`wait`."""

    def __init__(self) -> None:
        self._parent: int | None = None

    def wait(self) -> None:
        """Ends this process if no replica has come in time."""
        timer = threading.Timer(UNCLAIMED_S, self._unclaimed)
        timer.daemon = True
        timer.start()

    def take(self, pid: int) -> bool:
        """Binds this process to the life of the replica ``pid``; False if it has one. Called in the event loop."""
        if self._parent is not None:
            return False
        self._parent = parent = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()

        def orphaned() -> None:
            loop.remove_reader(parent)
            _leave()

        # Readable once the process has ended.
        loop.add_reader(parent, orphaned)
        return True

    def _unclaimed(self) -> None:
        if self._parent is None:
            _leave()


def _leave() -> None:
    """Ends this process as Ray means actors to end, whatever they are doing: Ray warns of one that just exits."""
    me = ray.get_runtime_context().current_actor
    for end in (threading.Timer(LEAVE_S, os._exit, (0,)), threading.Thread(target=ray.kill, args=(me,))):
        end.daemon = True
        end.start()


def _name(spec: WorkerSpec) -> str:
    return f"planted:{spec.model}:{spec.stage}"
