"""A planted worker's side of its adoption (:mod:`deployments.nursery`): whose life it shares, or its end."""

from __future__ import annotations

import asyncio
import os
import threading

import ray

UNADOPTED_S = 180.0
# Ray is told that a worker ends, and given so long for it.
LEAVE_S = 2.0


class Planted:
    """It travels to the worker unset and begins there with :meth:`wait`."""

    def __init__(self) -> None:
        self._parent: int | None = None

    def wait(self) -> None:
        """Ends this process if no replica has come in time."""
        timer = threading.Timer(UNADOPTED_S, self._unadopted)
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

    def _unadopted(self) -> None:
        if self._parent is None:
            _leave()


def _leave() -> None:
    """Ends this process as Ray means actors to end, whatever they are doing: Ray warns of one that just exits."""
    me = ray.get_runtime_context().current_actor
    for end in (threading.Timer(LEAVE_S, os._exit, (0,)), threading.Thread(target=ray.kill, args=(me,))):
        end.daemon = True
        end.start()
