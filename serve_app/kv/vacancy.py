"""Lets a node go that nobody serves on any more.

Ray's autoscaler gives a node back when no process of an actor is left on it, and a pool is one. So a pool on a node
that can be given back ends once no replica and no worker has been there for a while. Its chunks go with it, as they
would with the node; files stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

log = logging.getLogger(__name__)

# What serves, by the first word of its processes' titles, as Ray writes them.
SERVING = tuple(
    f"ray::{name}".encode()
    for name in ("ServeReplica", "EngineWorker", "RankWorker", "DraftWorker", "EncoderWorker", "PredictorWorker")
)
# A node has been without any for so long.
EMPTY_S = 30.0
LOOK_S = 5.0


def occupied() -> bool:
    """Whether a process that serves runs on this machine; also where the system does not tell."""
    try:
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return True
    for entry in processes:
        try:
            if (entry / "cmdline").read_bytes().startswith(SERVING):
                return True
        except OSError:  # it has ended
            continue
    return not processes


def current_actor() -> Any:
    """The handle of the actor that asks."""
    return ray.get_runtime_context().current_actor


def end(actor: Any) -> None:
    """Ends an actor for good. One that exits by itself waits until nobody has a reference to what it owns."""
    ray.kill(actor)


async def leave_when_empty(leave: Callable[[], object], serving: Callable[[], bool] = occupied) -> None:
    """Calls ``leave`` once nobody has served here for :data:`EMPTY_S`."""
    empty = 0.0
    while empty < EMPTY_S:
        await asyncio.sleep(LOOK_S)
        empty = 0.0 if await asyncio.to_thread(serving) else empty + LOOK_S
    log.info("nobody serves on this node any more; the pool ends, so that the node can be given back")
    leave()
