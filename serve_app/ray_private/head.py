"""Ray's own daemons, as the process that started them sees them."""

from __future__ import annotations


def ended_daemons() -> list[str]:
    """Names of the daemons of this process's Ray (``gcs_server``, ``raylet``, ...) that have ended by themselves."""
    from ray._private import worker

    node = worker._global_node
    return [] if node is None else [name for name, _ in node.dead_processes()]
