"""Whether Serve is taking a replica away, which it tells nobody in the replica."""

from __future__ import annotations

from ray._private.worker import global_worker


def draining() -> bool:
    """Whether this process is a replica that ends what it has and gets nothing new."""
    actors = global_worker.actors.values()
    return any(getattr(getattr(actor, "_replica_impl", None), "_shutting_down", False) for actor in actors)
