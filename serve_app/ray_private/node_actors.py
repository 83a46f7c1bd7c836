"""Actors of which a node has one: how they are found or started, and how they let the node go.

Ray's autoscaler gives a node back when no process of an actor is left on it, and such an actor is one. So one on a node
that can be given back ends once no replica and no worker has been there for a while. What it holds goes with it, as it
would with the node; files stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.ray_private.fork_server import forked

log = logging.getLogger(__name__)

NAMESPACE = "serve_app"
# By the first word of their processes' titles, as Ray writes them.
WORKERS = tuple(
    f"ray::{name}" for name in ("EngineWorker", "RankWorker", "DraftWorker", "EncoderWorker", "PredictorWorker")
)
SERVING = tuple(title.encode() for title in ("ray::ServeReplica", *WORKERS))
# What Ray gives the head.
HEAD = "node:__internal_head__"
# A node has been without any that serves for so long.
EMPTY_S = 30.0
LOOK_S = 5.0


def of_node(cls: type, name: str, node_id: str) -> Any:
    """What makes the actor ``name`` on a node, or gives the handle of the one that is there. It is started again
    where it dies, unless it ends by :func:`leaving`.
    """
    return ray.remote(cls).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        **forked(with_torch=False),
    )


def may_go(node_id: str) -> bool:
    """Whether a node may be given back: the head never is."""
    return any(node["NodeID"] == node_id and HEAD not in node["Resources"] for node in ray.nodes())


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


def leaving(serving: Callable[[], bool] = occupied) -> asyncio.Task[None]:
    """Ends the actor that asks once nobody serves on its node any more. One that exited by itself would wait until
    nobody has a reference to what it owns.
    """
    actor = ray.get_runtime_context().current_actor
    return asyncio.ensure_future(leave_when_empty(partial(ray.kill, actor), serving))


async def leave_when_empty(leave: Callable[[], object], serving: Callable[[], bool]) -> None:
    """Calls ``leave`` once nobody has served here for :data:`EMPTY_S`."""
    empty = 0.0
    while empty < EMPTY_S:
        await asyncio.sleep(LOOK_S)
        empty = 0.0 if await asyncio.to_thread(serving) else empty + LOOK_S
    log.info("nobody serves on this node any more; it can be given back")
    leave()
